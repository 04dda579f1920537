"""The calls into torch that are not public, each with its reason. Tests run them on every supported version."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing.connection
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def run_backward(losses: tuple[Any, ...], starts: tuple[torch.Tensor, ...]) -> None:
    """`torch.autograd.backward(losses, starts)` for starts that are known to fit: its checks cost as much as a small model's update.

    A loss may be an edge of the graph.
    """
    torch.autograd.graph._engine_run_backward(losses, starts, False, False, (), allow_unreachable=True, accumulate_grad=True)


def call_node(node: Any, gradients: dict[int, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """What a node of the graph, not one written in Python, makes of the gradients of its results: one for each of its edges.

    Of these it computes those that the running backward needs, all if none runs, and no hook fires. A backward through the engine would
    go on along all edges that lead to what is needed.
    """
    found = node(*[gradients.get(index) for index in range(len(node._input_metadata))])
    return found if isinstance(found, tuple) else (found,)


def put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """`tensor.copy_(values)` that autograd does not take for a change, for values that the tensor had before.

    Batch normalisation saves its running statistics for the backward, though it needs only that they are there.
    """
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.copy_(values)


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


def written_class(module: nn.Module) -> type:
    """The class of a module as its author wrote it: `fully_shard` gives a module a subclass that exists nowhere in the source."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return type(module)
    return type(module).__mro__[type(module)._orig_cls_mro_index]


def fsdp_modules(module: nn.Module) -> list[Any]:
    """The FSDPModules in a module, itself included. Asking does not import FSDP, which takes seconds."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]


def settle_fsdp_memory(module: nn.Module) -> None:
    """Make FSDP take over the parameters that its modules hold now, in memory that stays theirs.

    FSDP gathers from memory that is padded to equal sizes. It moves parameters there at the first forward, so that whoever kept the
    local tensor of an uneven shard would go on with memory that FSDP no longer reads.
    """
    for unit in fsdp_modules(module):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                info = parameter._module_info
                parameter.sharded_param = getattr(info.module, info.param_name)  # else it insists on objects swapped in place
                parameter.reset_sharded_param()
            group._reset_sharded_params = True


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


def default_store() -> Any:
    """The key-value store behind the default process group, which may have been made by somebody else."""
    return torch.distributed.distributed_c10d._get_default_store()


def set_group_timeout(group: Any, timeout: timedelta) -> None:
    """The time limit of collectives that start on a process group from now on. A fake group of a dry run has none.

    Before torch 2.14, which warns of the old name, there is no public way.
    """
    dist = torch.distributed
    if dist.get_backend(group) == "fake":
        return
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def abort_process_groups() -> None:
    """Take down the default process group and all others without waiting for collectives under way, which may never end."""
    torch.distributed.distributed_c10d._abort_process_group()


def group_timeout(group: Any) -> timedelta | None:
    """The time limit of collectives on a process group; None if it has none."""
    if torch.distributed.get_backend(group) == "fake":
        return None
    return group._get_backend(group._device_types[0]).options._timeout


def fsdp_unit_name(value: Any) -> str | None:
    """The name of the module that an FSDP parameter group belongs to; None for anything else. Only a traceback shows such groups."""
    return getattr(value, "_module_fqn", None) if type(value).__name__ == "FSDPParamGroup" else None


def forget_meshes() -> None:
    """Drop what DTensor remembers of meshes whose process groups are gone.

    Meshes compare by shape and ranks, not by group, so a cached result of one with the same shape would lead to groups that were destroyed.
    """
    if distributed_tensor_type() is not None:
        from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        clear_redistribute_planner_cache()
        _clear_sharding_prop_cache()


def without_views(output: Any) -> Any:
    """`output` with a copy in place of each tensor with a graph that is a view of another; None if there is none.

    Seen in the containers that FSDP looks into. Nothing public tells whether a tensor is a view.
    """
    from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors

    tensors = collect_grad_tensors(output)
    if all(tensor._base is None for tensor in tensors):
        return None
    return replace_grad_tensors(output, iter([tensor if tensor._base is None else tensor.clone() for tensor in tensors]))


def forget_gradients(unit: Any) -> None:
    """Drop what an aborted forward or backward left in an FSDP unit, the gradients that were accumulated and not reduced too.

    `reset_iter_state` is refused by all units but the one that ran first, and keeps those gradients.
    """
    state = unit._get_fsdp_state()
    if state._is_root:
        unit.reset_iter_state()
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.sharded_param.grad = parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def collect_gradients(unit: Any) -> None:
    """Add the gradients of an FSDP unit's whole parameters to those that wait for a reduction in a dtype of its own.

    FSDP does so in a hook of the stage's inputs. A backward that goes to the parameters alone does not run it, and the next one would be
    added in the dtype of the parameter.
    """
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def reduce_gradients(units: Iterable[Any]) -> None:
    """Let FSDP units reduce what they have collected, as after the last backward, and wait for it.

    FSDP offers this only as a hook of a backward. Units that were never called have nothing and are left alone.
    """
    for unit in units:
        state = unit._get_fsdp_state()
        if state._is_root:  # it does this for the units inside
            state._state_ctx.is_last_backward = True
            state._root_post_backward_final_callback()


def reduce_in_one_dtype(unit: Any) -> None:
    """Let an FSDP unit reduce what it accumulated without reducing, together with the gradients of the last backward.

    With a reduction dtype of its own torch fails an assertion where a parameter is used in the last backward for the first time, or in
    none (pytorch #196996), and an attribute is missing where a unit did not run yet. This goes before the method of FSDP that runs
    after the backward of a unit.
    """
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        group.post_backward = functools.partial(_post_backward, group)


def _post_backward(group: Any, *unused: Any) -> None:
    gathered = [parameter for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param")]
    if not gathered:
        return
    if group.reduce_grads and any(parameter.unsharded_accumulated_grad is not None for parameter in gathered):
        for parameter in gathered:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
            whole = parameter._unsharded_param
            if parameter.unsharded_accumulated_grad is None and whole.grad is None and whole.requires_grad:
                parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=group._reduce_dtype)
    type(group).post_backward(group, *unused)


def keep_reduced_dtype(unit: Any, dtype: torch.dtype) -> None:
    """Let an FSDP unit reduce the gradients of parameters narrower than `dtype` in it, and keep them in it.

    FSDP brings what it has reduced back to the dtype of the parameter before it adds it to the gradient, so a sum of bfloat16 gradients
    would be rounded once per microbatch. It settles its dtypes at the first forward, which is where this steps in.
    """
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        group._init_mp_dtypes = functools.partial(_settle_dtypes, group, dtype)


def _settle_dtypes(group: Any, dtype: torch.dtype) -> None:
    trainable = [p.sharded_param.dtype for p in group.fsdp_params if p.sharded_param.requires_grad]
    narrower = bool(trainable) and all(own.itemsize < dtype.itemsize for own in trainable)
    if narrower:
        group.mp_policy = replace(group.mp_policy, reduce_dtype=dtype)
    type(group)._init_mp_dtypes(group)
    if narrower:
        group._orig_dtype = None  # which means: as reduced


def handle_on_dtensors(handlers: dict[Any, Callable[..., Any]]) -> None:
    """Let DTensor call `handler(op, args, kwargs)` for these operators in place of its own rules, as torch's `loss_parallel` does."""
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher._custom_op_handlers.update(handlers)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor gathered on all ranks of its mesh, which must all call this; any other tensor as it is."""
    dtensor = distributed_tensor_type()
    return tensor.full_tensor() if dtensor is not None and isinstance(tensor, dtensor) else tensor  # type: ignore[attr-defined]


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scaled_dot_product_attention` and the logsumexp of the scores, which it keeps to itself. (B, heads, T, E); `bias` on a CPU only."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]


def flash_attention_backward(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], gradient: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor,
    *, is_causal: bool, bias: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of queries, keys and values. The keys may be some of those that `out` and `logsumexp` are over."""
    aten, q, saved = torch.ops.aten, inputs[0], (gradient, *inputs, out, logsumexp.contiguous())
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*saved, 0.0, is_causal, attn_mask=bias, scale=scale)
    state = q.new_empty(2, dtype=torch.uint64)  # of the random numbers, which are not used without dropout
    lengths = (None, None, q.shape[2], inputs[1].shape[2])
    return aten._scaled_dot_product_flash_attention_backward(*saved, *lengths, 0.0, is_causal, state, state, scale=scale)
