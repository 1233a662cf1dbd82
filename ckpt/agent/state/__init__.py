"""The facts of one job and the pure rules that need nothing else: what ranks, slots and replicas are doing.

May import agent.runtime, ckpt.ipc and what lies below these. Start with job_facts.py (what every part reads) and
actions.py (what the scheduler asks for); agent/scheduler/scheduler.py lists the parts and calls their decisions.
"""
