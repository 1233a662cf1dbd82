"""The part of ckpt that runs in the user's process: it walks, copies and restores the training state.

Its five packages, top to bottom, each of which imports only those below it: loop (the entry, the steps, the exit),
restore, snapshot, link (the connection to the agent), state (the walk). They may import torch and ckpt.ipc, but never
ckpt.agent. Start reading at loop/entry.py and loop/saver.py.
"""
