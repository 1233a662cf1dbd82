"""The `ckpt` command line: one function per command, over the readers of a store and a run's agent.

Start with main.py, which lists the commands; out.py prints, and exits.py has the exit codes. It may import every
package of ckpt. The trainer and the Checkpointer, and so torch, are imported only inside functions.
"""
