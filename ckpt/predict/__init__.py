"""The prediction of failures: a node's signals, the sources that raise alarms from them, and how far each is trusted.

Start with signals.py (what is read), watching.py (which source raises an alarm) and scoring.py (when a source counts as
proven). Imports only the base modules of ckpt; training.py also needs torch.
"""
