"""What the agent shows: the status for `ckpt watch`, the metrics page, and the file of events.

It only observes: no decision depends on it. It may import the packages from adaptive downwards. Start reading at
status.py.
"""
