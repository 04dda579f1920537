"""Data of a run: providers that make packs, and the stream that hands them to the loop.

Read `provider.py` to write a provider, `auto.py` for datasets, `iterables.py` for loaders, `packing.py` for documents,
`stream.py` for epochs, prefetch and position.
"""

from trainer_kit.data.auto import AutoDataProvider
from trainer_kit.data.iterables import IterableDataProvider, as_provider
from trainer_kit.data.pack import Pack, Position, batch_size, iterate_tensors, map_tensors
from trainer_kit.data.packing import SequencePacking
from trainer_kit.data.provider import DataProvider
from trainer_kit.data.randomness import fork_random
from trainer_kit.data.stream import DataStream

__all__ = [
    "AutoDataProvider",
    "DataProvider",
    "DataStream",
    "IterableDataProvider",
    "Pack",
    "Position",
    "SequencePacking",
    "as_provider",
    "batch_size",
    "fork_random",
    "iterate_tensors",
    "map_tensors",
]
