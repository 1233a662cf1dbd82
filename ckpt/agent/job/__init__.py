"""One job on this node: its scheduler, its ranks and slots, the actions that carry out each decision, and its restarts.

It may import agent/commit and everything below it in the agent; it never imports agent/node, agent/adaptive or
agent/observability. Start with scheduler.py (what is decided), then job.py (which part carries it out) and
follower_job.py (the ranks of a job that another node coordinates).
"""
