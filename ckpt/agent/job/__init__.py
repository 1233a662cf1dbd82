"""One job on this node: its ranks and slots, the parts that carry out the scheduler's actions, and its restarts.

It may import agent/scheduler, agent/commit and everything below them in the agent; it never imports agent/node,
agent/adaptive or agent/observability. Start with job.py (which part carries out an action), then follower_job.py (the
ranks of a job that another node coordinates).
"""
