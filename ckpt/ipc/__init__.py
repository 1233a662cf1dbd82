"""The interface between trainer and agent on one node: messages, arenas, the control page, the agent process.

Trainer and agent both import this package, so that neither imports the other. It may import the base modules, the leaf
packages and `ckpt.store`. Start with `client` and `messages`, then `arena` and `control_page`.
"""
