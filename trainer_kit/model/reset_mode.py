"""`ResetMode`: watches the tensor operations of `reset_parameters` and keeps them independent of which other modules exist.

While the reset of a module runs, its own tensors are its scope: anything goes there, with random numbers from the default generators.
On tensors of other modules, each random in-place operation gets a generator seeded by (seed, parameter, number of the draw), and
element-wise operations with plain numbers are let through; anything else is refused, because its result would depend on how that
tensor is cut over ranks. On one that is cut, random numbers are drawn for the whole of it and the rank keeps its part, and element-wise
operations run on the local tensor. Every write is recorded: what nobody wrote has no initial value.

Before editing: writing to a view of a DTensor does nothing, without an error, so no view of one may get out of here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.layout import fill, is_distributed, layout_of, local_of
from trainer_kit.model.operations import (
    HARMLESS,
    OVERWRITING,
    RANDOM,
    Write,
    destinations,
    operation_name,
    storage_key,
    tensors_in,
    write_of,
)
from trainer_kit.model.torch_init import OperationMode
from trainer_kit.random_state import derive_seed


@dataclass(slots=True, eq=False)
class TensorRecord:
    """A parameter or buffer to initialise, by its canonical name. `owner` describes its module; `dtype` is the constructor's."""

    name: str
    owner: str
    tensor: torch.Tensor
    dtype: torch.dtype
    num_written: int = 0
    writes: list[Write] = field(default_factory=list)

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds it as a DTensor, mostly a part of it."""
        return is_distributed(self.tensor)

    @property
    def is_initialised(self) -> bool:
        """Whether every element was written. Changing what is there (`mul_`, `clamp_`) is no initial value."""
        return self.num_written >= self.tensor.numel()


class ResetMode(OperationMode):
    """`known` maps storages to the records they stand for, `scope` says whose reset runs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.known: dict[int, TensorRecord] = {}
        self._seed = seed
        self._draws: Counter[str] = Counter()
        self._label = ""
        self._own: frozenset[int] = frozenset()
        self._is_paused = False

    @contextmanager
    def scope(self, label: str, own: frozenset[int]) -> Iterator[None]:
        """The reset of one module, which owns these storages. Scopes nest: a reset may call those of other modules."""
        outer = self._label, self._own
        self._label, self._own = label, own
        try:
            yield
        finally:
            self._label, self._own = outer

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is watched: for our own copies, and for what counts as one operation."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        name = operation_name(func)
        foreign = [record for tensor in tensors_in(args, kwargs) if (record := self._foreign(tensor)) is not None]
        cut = [record for record in foreign if record.is_cut]
        if cut and func.is_view and name not in HARMLESS:
            self._refuse_view(name, cut[0])
        if foreign and not (func.is_view or name in HARMLESS):
            self._check(func, foreign[0], args, kwargs)
        if name in RANDOM and (record := self._foreign(args[0])) is not None:
            result = self._draw(record, func, name, args[0], args[1:], kwargs)
        elif cut and destinations(name, args, kwargs):
            result = self._change_locals(func, name, cut[0], args, kwargs)
        else:
            result = func(*args, **kwargs)
        for tensor in destinations(name, args, kwargs):
            self._note(tensor, write_of(name, tensor, args, kwargs, by_owner=storage_key(tensor) in self._own))
        return result

    def truncated_normal(self, original: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`nn.init.trunc_normal_` as one draw."""
        record = self._foreign(tensor)
        with self.paused():
            if record is None:
                original(tensor, *args, **kwargs)
            else:
                self._draw(record, original, "trunc_normal_", tensor, args, kwargs)
        self._note(tensor, write_of("trunc_normal_", tensor, (tensor, *args), {}, by_owner=record is None))
        return tensor

    def _foreign(self, tensor: torch.Tensor) -> TensorRecord | None:
        key = storage_key(tensor)
        return None if key in self._own else self.known.get(key)

    def _draw(
        self,
        record: TensorRecord,
        draw: Callable[..., Any],
        name: str,
        tensor: torch.Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> torch.Tensor:
        if kwargs.get("generator") is not None:
            raise ModelError(
                f"{self._label} passes generator= to {name} on {record.name!r}; initial values are a function of the seed and the name "
                "of the parameter. Leave generator= out"
            )
        generator = torch.Generator(device=tensor.device)
        generator.manual_seed(derive_seed(self._seed, "draw", record.name, self._draws[record.name]))
        self._draws[record.name] += 1
        # In the dtype that the constructor chose, so that a bf16 model has the values of the fp32 model, rounded.
        target = tensor
        if is_distributed(tensor):
            target = torch.empty(tensor.shape, dtype=record.dtype, device=tensor.device)
        elif tensor.dtype != record.dtype:
            target = torch.empty_like(tensor, dtype=record.dtype)
        draw(target, *args, **{**kwargs, "generator": generator})
        if target is not tensor:
            fill(tensor, target)
        return tensor

    def _change_locals(self, func: Any, name: str, record: TensorRecord, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An element-wise in-place operation with tensors that are cut over ranks. Those that meet must be cut in the same way."""
        if not all(_is_alike(target, other) for target, *others in _operands(args, kwargs) for other in others):
            raise ModelError(
                f"{self._label} combines {record.name!r} by {name} with a tensor that lies differently on the ranks; move the operation "
                f"into reset_parameters of the module that owns it, {record.owner}, where it finds whole tensors"
            )
        func(*(_local(value) for value in args), **{key: _local(value) for key, value in kwargs.items()})
        return args[0] if isinstance(args[0], torch.Tensor) else None

    def _refuse_view(self, name: str, record: TensorRecord) -> None:
        raise ModelError(
            f"{self._label} takes a part or another view of {record.name!r} ({name}), which is distributed over ranks, where writing to a "
            "view does nothing. On tensors of other modules, a reset may use random and element-wise in-place operations on the whole "
            f"tensor. Move this one into reset_parameters of the module that owns it, {record.owner}, where it finds whole tensors"
        )

    def _check(self, func: Any, record: TensorRecord, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse what is not element-wise, and in-place operations that bring in a tensor which is no parameter or buffer."""
        name = operation_name(func)
        is_elementwise = "out" not in kwargs and (name in OVERWRITING or torch.Tag.pointwise in func.tags or _is_foreach(name))
        brought = [t for t in tensors_in(args, kwargs) if t.dim() > 0 and storage_key(t) not in self.known]
        if is_elementwise and not (brought and destinations(name, args, kwargs)):
            return
        what = f"changes {record.name!r} by {name} with a computed tensor" if is_elementwise else f"runs {name} on {record.name!r}"
        raise ModelError(
            f"{self._label} {what}. On tensors of other modules, a reset may use random and element-wise in-place operations with plain "
            "numbers only, because they may be cut over ranks. Move anything else (orthogonal_, eye_, copies of computed tensors) into "
            f"reset_parameters of the module that owns it, {record.owner}"
        )

    def _note(self, tensor: torch.Tensor, write: Write) -> None:
        record = self.known.get(storage_key(tensor))
        if record is not None:
            record.writes.append(write)
            if write.overwrites:
                record.num_written += write.num_elements


def _is_foreach(name: str) -> bool:
    """An in-place operation on a list of tensors; all of these are element-wise."""
    return name.startswith("_foreach_") and name.endswith("_")


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[list[torch.Tensor]]:
    """The tensors that meet element by element, the destination first; several such rows for an operation on lists."""
    if isinstance(args[0], torch.Tensor):
        yield [args[0], *tensors_in(args[1:], kwargs)]
        return
    single = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.Tensor)]
    lists = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, (list, tuple))]
    for row in zip(args[0], *(values for values in lists if len(values) == len(args[0])), strict=True):
        yield [*(value for value in row if isinstance(value, torch.Tensor)), *single]


def _is_alike(target: torch.Tensor, other: torch.Tensor) -> bool:
    if other.dim() == 0 and not is_distributed(other):
        return True
    one, two = layout_of(target), layout_of(other)
    return (one.shape, one.offsets, one.sizes) == (two.shape, two.offsets, two.sizes)


def _local(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return local_of(value)
    return [_local(item) for item in value] if isinstance(value, (list, tuple)) else value
