"""The durable binary formats: frames and their codecs, manifests, commit records, values, parity and .safetensors.

Imports the base modules and layout.layout only. Start with `manifest` (what a checkpoint consists of), then `columns`
(the container of every binary file) and `record`.
"""
