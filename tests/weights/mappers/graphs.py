"""Random graphs of exact mappers, and random tensors for them: what the property tests draw.

A graph is a list of stages; a stage is a Parallel of leaves, each of which uses up tensors of the state and makes others. What no leaf of a
stage takes passes it.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from trainer_kit.weights import (
    Chunk,
    Concatenate,
    Copy,
    Function,
    IdentityMapper,
    Parallel,
    Permute,
    Rename,
    Reshape,
    Split,
    Squeeze,
    Stack,
    Transpose,
    Unsqueeze,
    Unstack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


@dataclass
class Graph:
    """tensors: of the inputs. stages: in order. opaque: whether some output is not made of pieces."""

    tensors: dict
    stages: list
    opaque: bool


def random_tensor(shape, dtype, seed):
    """Any bits, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8).view(dtype).squeeze(-1)


@st.composite
def graphs(draw, name="t{}"):
    """`name`: how tensors are called, with a hole for a number; the same tensors come again and again, so that they can be put together."""
    kinds = draw(st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=2))
    drawn = [kinds[k] for k in draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=5))]
    tensors = {name.replace("{}", str(k)): random_tensor(tuple(shape), dtype, k) for k, (shape, dtype) in enumerate(drawn)}
    state = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    builder = _Builder(draw, state, name)
    stages = [builder.stage() for _ in range(draw(st.integers(1, 4)))]
    return Graph(tensors, stages, builder.opaque)


class _Builder:
    def __init__(self, draw, state, name):
        self.draw, self.state, self.name, self.opaque = draw, state, name, False
        self.count = len(state)

    def stage(self):
        free = self.draw(st.permutations(list(self.state)))
        leaves = []
        while free and len(leaves) < 4:
            source = free.pop()
            shape, dtype = self.state[source]
            options = ["rename", "identity", "unsqueeze", "copy", "function"]
            alike = [other for other in free if self.state[other] == (shape, dtype)]
            options += ["stack"] if alike else []
            options += ["concatenate", "concatenate_uneven"] if alike and shape else []
            options += ["permute", "chunk", "split", "unstack"] if shape else []
            options += ["transpose", "merge"] if len(shape) > 1 else []
            options += ["squeeze"] if 1 in shape else []
            options += ["cut"] if any(size > 1 for size in shape) else []
            many = alike[: self.draw(st.integers(1, 2))] if alike else []
            leaf, outputs, used = getattr(self, f"_{self.draw(st.sampled_from(options))}")(source, shape, many)
            free = [name for name in free if name not in used]
            for name in used:
                del self.state[name]
            self.state.update({name: (tuple(size), dtype) for name, size in outputs.items()})
            leaves.append(leaf)
        return Parallel(leaves)

    def fresh(self):
        self.count += 1
        return self.name.replace("{}", str(self.count - 1))

    def dim(self, shape):
        return self.draw(st.integers(-len(shape), len(shape) - 1))

    def _rename(self, source, shape, _):
        name = self.fresh()
        return Rename(source, name), {name: shape}, [source]

    def _identity(self, source, shape, _):
        return IdentityMapper([source]), {source: shape}, [source]

    def _transpose(self, source, shape, _):
        dims = (self.dim(shape), self.dim(shape))
        order = list(range(len(shape)))
        order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
        return Transpose(source, dims=dims), {source: [shape[dim] for dim in order]}, [source]

    def _unsqueeze(self, source, shape, _):
        dim, name = self.draw(st.integers(0, len(shape))), self.fresh()
        return Unsqueeze(source, name, dim=dim), {name: (*shape[:dim], 1, *shape[dim:])}, [source]

    def _squeeze(self, source, shape, _):
        dim = shape.index(1)
        return Squeeze(source, dim=dim), {source: (*shape[:dim], *shape[dim + 1 :])}, [source]

    def _merge(self, source, shape, _):
        dim = self.draw(st.integers(0, len(shape) - 2))
        result = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        return Reshape(source, source_shape=shape, shape=result), {source: result}, [source]

    def _cut(self, source, shape, _):
        dim = self.draw(st.sampled_from([dim for dim, size in enumerate(shape) if size > 1]))
        factor = self.draw(st.sampled_from([n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0]))
        result = (*shape[:dim], factor, shape[dim] // factor, *shape[dim + 1 :])
        wild = result if 0 in shape else (*result[:dim], -1, *result[dim + 1 :])
        return Reshape(source, source_shape=shape, shape=wild), {source: result}, [source]

    def _permute(self, source, shape, _):
        dim, name = self.dim(shape), self.fresh()
        return Permute(source, name, order=self.draw(st.permutations(range(shape[dim]))), dim=dim), {name: shape}, [source]

    def _chunk(self, source, shape, _):
        dim = self.dim(shape) % len(shape)
        count = self.draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % n == 0]))
        part = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
        outputs = {self.fresh(): part for _ in range(count)}
        return Chunk(source, outputs, dim=dim), outputs, [source]

    def _split(self, source, shape, _):
        dim = self.dim(shape) % len(shape)
        first = self.draw(st.integers(0, shape[dim]))
        outputs = {self.fresh(): (*shape[:dim], size, *shape[dim + 1 :]) for size in (first, shape[dim] - first)}
        return Split(source, outputs, sizes=(first, shape[dim] - first), dim=dim), outputs, [source]

    def _unstack(self, source, shape, _):
        dim = self.dim(shape) % len(shape)
        if shape[dim] == 0:
            return self._rename(source, shape, _)
        outputs = {self.fresh(): (*shape[:dim], *shape[dim + 1 :]) for _ in range(shape[dim])}
        return Unstack(source, outputs, dim=dim), outputs, [source]

    def _stack(self, source, shape, others):
        dim, name = self.draw(st.integers(0, len(shape))), self.fresh()
        used = [source, *others]
        return Stack(used, name, dim=dim), {name: (*shape[:dim], len(used), *shape[dim:])}, used

    def _concatenate(self, source, shape, others):
        dim, name, used = self.dim(shape) % len(shape), self.fresh(), [source, *others]
        return Concatenate(used, name, dim=dim), {name: (*shape[:dim], shape[dim] * len(used), *shape[dim + 1 :])}, used

    def _concatenate_uneven(self, source, shape, others):
        leaf, outputs, used = self._concatenate(source, shape, others)
        return Concatenate(used, leaf.outputs[0], dim=leaf.dim, sizes=[shape[leaf.dim]] * len(used)), outputs, used

    def _copy(self, source, shape, _):
        outputs = {self.fresh(): shape, self.fresh(): shape}
        return Copy(source, outputs), outputs, [source]

    def _function(self, source, shape, _):
        self.opaque = True
        name = self.fresh()
        return Function(source, name, turn, backward=turn), {name: shape[::-1]}, [source]


def turn(tensor):
    """Something that undoes itself."""
    return tensor.permute(list(range(tensor.ndim))[::-1])
