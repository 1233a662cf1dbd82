"""Preemption of one job: hears notices that machines go away, and decides when the ranks leave and what is saved.

May import agent.state, agent.runtime and what lies below them. Start with preemption.py (when to leave), then
exit_vote.py (the verdict on a hold); notice_listener.py owns threads, the other modules do no I/O.
"""
