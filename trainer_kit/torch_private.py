"""The calls into torch that are not public, each with its reason. Tests run them on every supported version."""

from __future__ import annotations

import ctypes
import multiprocessing.connection
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def run_backward(losses: tuple[torch.Tensor, ...], starts: tuple[torch.Tensor, ...]) -> None:
    """`torch.autograd.backward(losses, starts)` for starts that are known to fit: its checks cost as much as a small model's update."""
    torch.autograd.graph._engine_run_backward(losses, starts, False, False, (), allow_unreachable=True, accumulate_grad=True)


def fingerprint(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Changes when a tensor is changed in place or another takes its place; says nothing of the values."""
    return tuple([number for tensor in tensors for number in (id(tensor), tensor._version)])


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, without the profiler range that torch puts around it where no profiler runs and nobody hooked into the step.

    That range costs a third of the update of a small model.
    """
    step = type(optimizer).step
    if getattr(step, "hooked", False) and not _is_watched(optimizer):
        step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    else:
        optimizer.step()


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    return bool(
        torch.autograd.profiler._is_profiler_enabled
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or "step" in vars(optimizer)  # torch's LR schedulers count the calls there
    )


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` reads `optimizer.found_inf` and then leaves the parameters alone; torch's fused optimizers do, for its GradScaler."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def multiply_and_flag_non_finite(tensors: list[torch.Tensor], factor: torch.Tensor, flag: torch.Tensor) -> None:
    """Multiply by `factor` and set `flag` to 1 if any element is inf or nan, in one pass; all tensors of one device and dtype.

    `factor` and `flag` are float32 elements on that device. `torch.amp.GradScaler` uses the same kernel. The public way (a norm per
    tensor, stacked) costs five times as much for small models.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, factor)


def cpu_float_view(tensor: torch.Tensor) -> ctypes.c_float:
    """The memory of a one-element float32 CPU tensor: its `value` is read and set without torch. The tensor must stay alive."""
    return ctypes.c_float.from_address(tensor.data_ptr())


def distributed_tensor_type() -> type | None:
    """The class DTensor, or None as long as nothing has imported it: no tensor can be one then, and the import takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def local_tensor(tensor: Any) -> torch.Tensor:
    """The local part of a DTensor without the autograd node and the checks of `to_local`."""
    return tensor._local_tensor


_CTYPES: dict[torch.dtype, Any] = {
    torch.float64: ctypes.c_double, torch.float32: ctypes.c_float, torch.bool: ctypes.c_bool, torch.uint8: ctypes.c_uint8,
    torch.int64: ctypes.c_int64, torch.int32: ctypes.c_int32, torch.int16: ctypes.c_int16, torch.int8: ctypes.c_int8,
}  # fmt: skip


def read_cpu_scalar(tensor: torch.Tensor) -> float:
    """The value of a one-element CPU tensor, from its memory.

    `item()` is a host synchronisation in the eyes of a dispatch mode and of readers; on a CPU there is nothing to wait for.
    """
    if tensor.dtype not in _CTYPES:
        tensor = tensor.to(torch.float32)
    return float(_CTYPES[tensor.dtype].from_address(tensor.data_ptr()).value)


def raise_for_dead_worker(iterator: Iterator[Any] | None, error: Exception) -> None:
    """If a worker of this DataLoader iterator died, raise a RuntimeError that says so instead of `error`.

    torch notices a death while it waits for data; while it receives some, only the broken connection shows.
    """
    workers = getattr(iterator, "_workers", [])
    if not workers or not isinstance(error, (OSError, EOFError)):
        return
    ending = multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=1.0)
    for worker in workers:
        if worker.sentinel in ending:
            worker.join(timeout=5.0)  # a process closes its files a moment before it counts as dead
    dead = [f"pid {worker.pid} with exit code {worker.exitcode}" for worker in workers if not worker.is_alive()]
    if dead:
        raise RuntimeError(f"a data worker died: {', '.join(dead)}. The usual cause is that it ran out of memory") from error


def iterate_loader(loader: DataLoader[Any]) -> Iterator[Any]:
    """`iter(loader)`, which draws the same random numbers whether its workers are new or stayed from the epoch before.

    A new iterator draws a seed for its workers before the sampler draws its own; one that is used again does not, so the order of an
    epoch would depend on where the run was resumed.
    """
    if getattr(loader, "persistent_workers", False) and loader._iterator is not None:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    return iter(loader)


def shut_down_loader(loader: DataLoader[Any], iterator: Iterator[Any]) -> None:
    """End the workers of a DataLoader's iterator and wait for them; the loader starts new ones when it is iterated again.

    torch does this when the iterator is collected, which the traceback of a caught error can put off for long.
    """
    if loader.num_workers:
        iterator._shutdown_workers()  # type: ignore[attr-defined]
        if loader._iterator is iterator:
            loader._iterator = None
