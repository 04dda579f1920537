"""Creates the state of an optimizer before its first step, so that a checkpoint has tensors to be loaded into.

torch has no public call for that. A step on zero gradients creates the state; afterwards parameters, gradients and groups are put
back and the state is set to what it is before a first step. Done in portions, so the copies of parameters stay small.
Whoever adds an optimizer whose fresh state is not zero adds its key to `_FRESH`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer_kit.exceptions import UnsupportedError
from trainer_kit.optim.portions import portions

PORTION_BYTES = 64 * 2**20
# State that does not start from zero in torch's optimizers: NAdam's running product, ASGD's averaging weight; True: the learning rate
# (ASGD's eta, Rprop's step sizes).
_FRESH: dict[str, float | bool] = {"mu_product": 1.0, "mu": 1.0, "eta": True, "step_size": True}


@torch.no_grad()
def materialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of every parameter that has none. Parameters, gradients, groups and existing state stay as they are, bit by bit.

    Parameters on the meta device stand for those of another rank, which creates their state.
    Raises UnsupportedError for an optimizer whose step needs a closure.
    """
    missing = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not optimizer.state.get(parameter) and not parameter.is_meta
    ]
    if not missing:
        return
    # The function below the hooks: neither a user's hook nor a scheduler's counter may see this step.
    step = inspect.unwrap(type(optimizer).step)
    arguments = list(inspect.signature(step).parameters.values())[1:]
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in arguments):
        raise UnsupportedError(
            f"{type(optimizer).__name__} takes a closure in step(); the trainer calls step() without. Use another optimizer="
        )
    with _undone(optimizer):
        for portion in portions([parameter for _, parameter in missing], _num_bytes, PORTION_BYTES):
            _step_on(optimizer, step, portion)
    for group, parameter in missing:
        _reset(optimizer.state.get(parameter, {}), group["lr"])


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _step_on(optimizer: torch.optim.Optimizer, step: Any, portion: list[torch.Tensor]) -> None:
    """One step in which only these parameters have a gradient, of zeros, and copies of their values: whatever it does is forgotten."""
    values = [parameter.data for parameter in portion]
    for parameter in portion:
        parameter.data = parameter.data.clone()
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    try:
        step(optimizer)
    finally:
        for parameter, value in zip(portion, values, strict=True):
            parameter.grad = None
            parameter.data = value


@contextmanager
def _undone(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Take all gradients away and weight decay out (it would leave a trace in the moments); put everything back at the end."""
    groups = [dict(group) for group in optimizer.param_groups]
    gradients = [(parameter, parameter.grad) for group in groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _reset(state: dict[str, Any], lr: float | torch.Tensor) -> None:
    for key, value in state.items():
        fresh = float(lr) if _FRESH.get(key) is True else _FRESH.get(key, 0)
        if isinstance(value, torch.Tensor):
            value.fill_(fresh)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            state[key] = type(value)(fresh)
