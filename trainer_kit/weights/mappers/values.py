"""Leaf mappers that are about values and not about places: `Cast`, `Copy` and its inverse `Unify`, `Constant`, `Drop`, `Function`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.ties import same_bits
from trainer_kit.weights.mapper import GroupText, StateGroup, StateMapper, refuse_group
from trainer_kit.weights.mappers.leaf import Leaf, OneToOne, one_or_several
from trainer_kit.weights.mappers.parallel import Parallel
from trainer_kit.weights.pieces import Piece, Shape, whole

Transform = Callable[..., torch.Tensor | Sequence[torch.Tensor]]


class Cast(OneToOne):
    """Another dtype. Lossy; the inverse casts to `source_dtype`, or leaves the dtype as it is where that is not given."""

    def __init__(
        self, input: str, output: str | None = None, *, dtype: torch.dtype | None, source_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(input, output, dtype=dtype)
        self.dtype, self.source_dtype = dtype, source_dtype

    def inverse(self, *, lossy: bool = False) -> Cast:
        if not lossy:
            raise UnsupportedError(f"{self!r} may change values; inverse(lossy=True) casts back")
        return Cast(self.output, self.input, dtype=self.source_dtype, source_dtype=self.dtype)

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        (tensor,) = tensors
        if self.source_dtype is not None and tensor.dtype != self.source_dtype:
            raise ConfigurationError(f"{self!r}: {self.input!r} is {tensor.dtype}, expected {self.source_dtype}; change source_dtype=")
        return [tensor.to(self.dtype or tensor.dtype)]


class Copy(Leaf):
    """One tensor under several names, such as a tied weight for a model that has it twice. Its inverse is `Unify`."""

    def __init__(self, input: str, outputs: Iterable[str]) -> None:
        super().__init__(input, outputs)

    def inverse(self, *, lossy: bool = False) -> Unify:
        return Unify(self.outputs, self.inputs[0])

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        return [tensors[0]] * len(self.outputs)

    def _mosaic(self, shapes: Sequence[Shape]) -> Iterable[Sequence[Piece]]:
        return [[whole(self.inputs[0], shapes[0])]] * len(self.outputs)


class Unify(Leaf):
    """Several equal tensors as one. `apply` raises ConfigurationError if they differ, bit by bit: one of them would be lost."""

    def __init__(self, inputs: Iterable[str], output: str) -> None:
        super().__init__(inputs, output)

    def inverse(self, *, lossy: bool = False) -> Copy:
        return Copy(self.outputs[0], self.inputs)

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        first, *others = tensors
        for name, other in zip(self.inputs[1:], others, strict=True):
            if (first.shape, first.dtype) != (other.shape, other.dtype) or not (first.is_meta or same_bits(first, other)):
                raise ConfigurationError(
                    f"{self!r}: {self.inputs[0]!r} and {name!r} differ, so they cannot be stored as one tensor; tie the weights of the "
                    "model, or use a mapper that keeps both, or Drop one of them"
                )
        return [first]


class Constant(Leaf):
    """An output that is made of nothing, such as a buffer that the files lack. Lossy: the inverse drops it."""

    def __init__(self, output: str, value: torch.Tensor) -> None:
        super().__init__((), output, shape=list(value.shape))
        self.value = value

    def inverse(self, *, lossy: bool = False) -> Drop:
        if not lossy:
            raise UnsupportedError(f"{self!r} has no place for another value; inverse(lossy=True) drops {self.outputs[0]!r}")
        return Drop(self.outputs)

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        return [self.value]


class Drop(StateMapper):
    """Tensors that are left out on purpose; those that are absent do no harm. Lossy: the inverse makes nothing."""

    def __init__(self, names: str | Iterable[str]) -> None:
        self.names = one_or_several(names)

    def __repr__(self) -> str:
        return f"Drop({len(self.names)} names)"

    def groups(self) -> Sequence[StateGroup]:
        return [StateGroup(frozenset((name,)), frozenset()) for name in self.names]

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if foreign := tensors.keys() - set(self.names):
            refuse_group(self, foreign)
        return {}

    def inverse(self, *, lossy: bool = False) -> Parallel:
        if not lossy:
            raise UnsupportedError(f"the tensors of {self!r} cannot come back; inverse(lossy=True) does without them")
        return Parallel([])

    def describe(self, group: StateGroup) -> GroupText:
        return GroupText(tuple(group.inputs), "Drop", ())


class Function(Leaf):
    """Any function of tensors, for what has no mapper of its own.

    forward: takes the inputs in their order, gives one tensor or a sequence of the outputs in their order, and leaves the inputs as they
    are. backward: undoes it, likewise from outputs to inputs; lossy says that it does so only nearly. Both are also called with meta
    tensors for the shapes and dtypes; one that cannot deal with those has a stand-in for them in `meta` or `backward_meta`.
    """

    def __init__(
        self,
        inputs: str | Iterable[str],
        outputs: str | Iterable[str],
        forward: Transform,
        *,
        backward: Transform | None = None,
        meta: Transform | None = None,
        backward_meta: Transform | None = None,
        lossy: bool = False,
    ) -> None:
        super().__init__(inputs, outputs)
        self.forward, self.backward, self.lossy = forward, backward, lossy
        self.meta, self.backward_meta = meta, backward_meta

    def inverse(self, *, lossy: bool = False) -> Function:
        if self.backward is None:
            raise UnsupportedError(f"{self!r} has no inverse; give it backward=")
        if self.lossy and not lossy:
            raise UnsupportedError(f"{self!r} is undone only nearly by its backward; inverse(lossy=True) does that")
        return Function(
            self.outputs, self.inputs, self.backward,
            backward=self.forward, meta=self.backward_meta, backward_meta=self.meta, lossy=self.lossy,
        )  # fmt: skip

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        on_meta = any(tensor.is_meta for tensor in tensors)
        found = (self.meta if on_meta and self.meta else self.forward)(*tensors)
        made = (found,) if isinstance(found, torch.Tensor) else tuple(found)
        if len(made) != len(self.outputs):
            raise ConfigurationError(f"{self!r}: the function gave {len(made)} tensors, expected {len(self.outputs)}, one per output")
        return made

    def _texts(self) -> list[str]:
        return [getattr(self.forward, "__name__", type(self.forward).__name__)]
