"""Snapshots of a job in memory: arenas and control page per node, the division, and checkpoints put together from them.

May import agent.net, agent.preemption, agent.state, agent.runtime and what lies below them. Start with
local_share.py (one node's ranks), memory_checkpoint.py (a checkpoint in memory) and inventory.py (what nodes hold).
"""
