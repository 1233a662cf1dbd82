"""Restore in the trainer: plans which tensors of the state a checkpoint fills, fetches and checks their frames, and
installs the other values once all ranks agree. The package imports torch; of the trainer it may import snapshot, link
and state. Start with restore.py, then read restore_plan.py and fetch.py.
"""
