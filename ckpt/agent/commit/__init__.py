"""Writing a job's checkpoints to the store: claims, commits spread over nodes, and commits of orphaned checkpoints.

It may import agent/restore, agent/replication, agent/snapshots, agent/net, agent/preemption, agent/state, agent/runtime
and what lies below the agent. Start with store_client.py, then distributed_write.py.
"""
