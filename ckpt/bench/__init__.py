"""The benchmark suite behind `ckpt bench URL`: a user's store and machine, each figure beside its ceiling in one run.

Start with suite.py (what is measured, in which order). job.py is the training job that it starts as a process of its
own. Imports the public API and what lies below it; the job alone imports torch.
"""
