"""The scheduler of one job decides when to take a snapshot, into which slot, and what to replicate and commit.

Pure. May import agent.preemption, agent.state and what lies below these. Start with scheduler.py, which owns the parts
and calls their decisions in order.
"""
