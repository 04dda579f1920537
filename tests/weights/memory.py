"""Counts the memory that torch operations allocate while they run, for tests of streaming."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak`: the most bytes that results of operations inside the block held at one time; views and in-place results count nothing."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and id_of(leaf) not in known:
                size = leaf.untyped_storage().nbytes()
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(leaf, self._freed, size)
        return result

    def _freed(self, size):
        self.live -= size


def id_of(tensor):
    return tensor.untyped_storage()._cdata
