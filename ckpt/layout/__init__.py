"""The layout of tensors over ranks: which rank stages which bytes, the manifest, and how a restore cuts frames.

Pure functions and values, without torch. It may import the base modules and `ckpt.format.manifest`. Start with
`layout` (the data types), then `division`, `staging` and `assemble` for a save, and `reshard` for a restore.
"""
