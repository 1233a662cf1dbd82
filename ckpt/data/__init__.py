"""Data loaders whose position is exact: over kills, workers, epochs and other numbers of ranks.

This file only exports the public names. `Loader` is for a dataset with a length, `StreamLoader` for an iterable one.
"""

from ckpt.data.loader import Loader
from ckpt.data.order import Batches, Order, Position
from ckpt.data.stream import StreamLoader

__all__ = ["Batches", "Loader", "Order", "Position", "StreamLoader"]
