"""The agent's foundation: its event loop, coroutines, worker threads, process priority and memory plan.

It imports no other package of the agent; ckpt.ipc, the store and the leaf packages are allowed. Start with
event_loop.py, then coroutines.py and workers.py.
"""
