"""The trainer's connections: to its agent (link.py and its parts), and to the other ranks while it enters
(collective.py).

This package may import trainer/state and ckpt.ipc. Start reading at link.py.
"""
