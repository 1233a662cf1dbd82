"""The simulator: what a job would lose on a cloud, from a trace of its nodes and a choice of levels and intervals.

Start with trace.py (when nodes come and go), then scenario.py (the job, its levels and its costs) and engine.py (what
happens to that job under that trace). Imports the base modules, ckpt.policy and ckpt.placement; no agent, no store.
"""
