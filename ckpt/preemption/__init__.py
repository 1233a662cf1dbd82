"""The listeners for notices that this machine will go away: clouds, Slurm, signals and a file.

Start with notice.py, which defines a notice and what each listener promises. detect.py chooses the listeners that fit
this machine. For a new cloud: add a module with its listener, and name it in detect.py. What the agent does about a
notice is in agent/preemption. Imports only the base modules of ckpt.
"""
