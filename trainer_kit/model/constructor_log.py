"""`ConstructorLog`: notices initial values that a constructor sets on the meta device and no reset sets again.

A model whose constructor ends in `self.apply(self._init_weights)` would train from other weights as a callable than as an instance,
without a word: on the meta device the constructor's values are lost, and the resets of the layers give torch's default ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.layout import local_of
from trainer_kit.model.operations import Write, destinations, operation_name, storage_key, write_of
from trainer_kit.model.reset_mode import TensorRecord
from trainer_kit.model.torch_init import OperationMode


class ConstructorLog(OperationMode):
    """Records the in-place operations on meta tensors while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._writes: dict[int, list[Write]] = {}
        self._alive: list[torch.UntypedStorage] = []  # a freed storage would lend its identity to another

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = operation_name(func)
        for tensor in destinations(name, args, kwargs):
            self._note(tensor, write_of(name, tensor, args, kwargs))
        return result

    def truncated_normal(self, original: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`nn.init.trunc_normal_`, which runs no operation at all on the meta device."""
        result = original(tensor, *args, **kwargs)
        self._note(tensor, write_of("trunc_normal_", tensor, (tensor, *args), {}))
        return result

    def _note(self, tensor: torch.Tensor, write: Write) -> None:
        if tensor.is_meta:
            self._writes.setdefault(storage_key(tensor), []).append(write)
            self._alive.append(local_of(tensor).untyped_storage())

    def writes_to(self, tensor: torch.Tensor) -> list[Write]:
        """The operations on the memory of a tensor, in order."""
        return self._writes.get(storage_key(tensor), [])


def check_repeated(constructed: Mapping[str, Sequence[Write]], records: Iterable[TensorRecord], model: str) -> None:
    """Refuse parameters whose last value in the constructor was given by operations that no reset ran.

    A reset of another module that set the parameter last is taken for the intended initialisation.
    """
    lost = []
    for record in records:
        final = _since_overwritten(constructed.get(record.name, ()), record.tensor.numel())
        last = _since_overwritten(record.writes, record.tensor.numel())
        if final and not _contains(record.writes, final) and (not last or last[0].by_owner):
            lost.append(f"  {record.name} of {record.owner}, by {final[0].operation}")
    if lost:
        raise ModelError(
            f"the constructor of {model} sets initial values that no reset sets again:\n"
            + "\n".join(lost)
            + "\nA callable builds the model on the meta device, where they are lost. Move them into reset_parameters of the module that "
            "owns the tensor, or of the whole model: def reset_parameters(self): self.apply(self._init_weights). "
            "Or pass a built nn.Module in place of the callable"
        )


def _since_overwritten(writes: Sequence[Write], num_elements: int) -> Sequence[Write]:
    """The operations that made the present value: from the last one that set all elements."""
    starts = [index for index, write in enumerate(writes) if write.overwrites and write.num_elements == num_elements]
    return writes[starts[-1] :] if starts else []


def _contains(writes: Sequence[Write], part: Sequence[Write]) -> bool:
    return any(list(writes[start : start + len(part)]) == list(part) for start in range(len(writes) - len(part) + 1))
