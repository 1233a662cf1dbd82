"""The agent's foundation: its event loop, worker threads, process priority, memory plan and the names of nodes.

It imports no other package of the agent; ckpt.ipc, the store and the leaf packages are allowed. Start with
event_loop.py, then workers.py.
"""
