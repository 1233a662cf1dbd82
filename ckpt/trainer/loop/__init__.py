"""What the training loop goes through: entry (entry.py), steps (steps.py), saves (saver.py) and exit (shutdown.py).
block.py holds them together.

The other modules observe the loop: optimizer steps, gradients, weights and loaders. This package may import all other
trainer packages. Start reading at block.py.
"""
