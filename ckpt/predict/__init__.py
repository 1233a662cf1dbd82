"""Failures foreseen: a node's signals, what raises an alarm by them, and how far each such source is to be believed."""
