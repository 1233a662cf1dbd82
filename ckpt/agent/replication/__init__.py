"""Replicas in peers' memory: where they are placed, made, kept, evicted, surveyed, and rebuilt from parity.

It may import the packages below it: agent.snapshots, agent.net, agent.preemption, agent.state, agent.runtime, ipc, and
lower. Start with replication_manager.py (what the coordinator decides), then replica_store.py (what a node keeps).
"""
