"""ckpt inside other frameworks: one file for each framework, which is imported only when that file is.

Each file uses ckpt's public API and nothing else of ckpt.
"""
