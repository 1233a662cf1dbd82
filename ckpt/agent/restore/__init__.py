"""Restore on one node: brings a checkpoint's frames to the local ranks from memory, peers, parity and the store.

It may import the packages below it: agent.replication, agent.snapshots, agent.net, agent.preemption, agent.state,
agent.runtime, ipc, and lower. Start with sources.py, the order of the sources, and restore_session.py, which asks
them for each frame.
Parity is no source there: collect.py has lost snapshots rebuilt in memory before the session begins.
"""
