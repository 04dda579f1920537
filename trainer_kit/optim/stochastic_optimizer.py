"""AdamW whose update is made in float32 and rounded stochastically into bfloat16 parameters (and state, if that is bfloat16).

Not a provider: that is `StochasticAdamW` in `stochastic.py`. float32 and float64 parameters are updated without rounding.
Everything works on portions, large parameters in slices, so the float32 copies never exceed one portion.
Formula: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; operations in the order of torch's foreach AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer_kit.mesh.layout import Layout, layout_of
from trainer_kit.optim.closure import loss_of
from trainer_kit.optim.rounding import NoisePart, draw_noise, mix, noise_key, round_stochastically

PORTION_ELEMENTS = {"cpu": 2**18}  # stays in the cache; other devices want few large kernels
DEFAULT_PORTION_ELEMENTS = 2**24


@dataclass(slots=True)
class _Item:
    """One parameter in one step, or a slice of a large one; `name` and `part` key its noise, `step` counts from 1."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int
    name: str
    part: NoisePart

    @property
    def kind(self) -> tuple[Any, ...]:
        """Items with the same are updated together."""
        return self.parameter.device, self.parameter.dtype, self.exp_avg.dtype, self.exp_avg_sq.dtype, self.step

    def slices(self, num_elements: int) -> Iterator[_Item]:
        """Itself, or slices of at most this many elements if it is larger and its tensors are contiguous."""
        tensors = (self.parameter, self.gradient, self.exp_avg, self.exp_avg_sq)
        if self.part.numel <= num_elements or not all(tensor.is_contiguous() for tensor in tensors):
            yield self
            return
        parts = list(self.part.split(num_elements))
        cuts = zip(*(tensor.view(-1).split([part.numel for part in parts]) for tensor in tensors), strict=True)
        for part, (parameter, gradient, exp_avg, exp_avg_sq) in zip(parts, cuts, strict=True):
            yield _Item(parameter, gradient, exp_avg, exp_avg_sq, self.step, self.name, part)


class StochasticRoundingAdamW(torch.optim.Optimizer):
    """params: as for torch; names (pairs of name and parameter) key the noise, else the position does.

    state_dtype: of the two moments; None: float32, or float64 for float64 parameters.
    accepts_fp32_gradients: the gradient of a bfloat16 parameter may be float32, so that nothing is lost when it accumulates.
    """

    accepts_fp32_gradients = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        state_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._state_dtype = state_dtype
        self._seed = seed
        self._layouts: dict[Tensor, Layout] = {}
        self._parts: dict[Tensor, NoisePart] = {}

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: getattr(self, key) for key in ("_state_dtype", "_seed", "_layouts")}
        return {**super().__getstate__(), **kept, "_parts": {}}

    def set_layouts(self, layouts: Mapping[Tensor, Layout]) -> None:
        """Tell which part of a whole each parameter is, so that an element is rounded with the same noise on any mesh."""
        self._layouts, self._parts = dict(layouts), {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; the gradient may be float32 or have the parameter's dtype."""
        loss = loss_of(closure)
        for index, group in enumerate(self.param_groups):
            for portion in _portions(self._items(index, group)):
                self._update(group, portion)
        return loss

    def _items(self, index: int, group: dict[str, Any]) -> Iterator[_Item]:
        names = group.get("param_names") or [f"{index}/{position}" for position in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                dtype = self._state_dtype or _compute_dtype(parameter)
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
            state["step"] += 1
            part = self._parts.get(parameter)
            if part is None:
                part = self._parts[parameter] = NoisePart(self._layouts.get(parameter) or layout_of(parameter))
            item = _Item(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], name, part)
            yield from item.slices(_portion_elements(parameter.device))

    def _update(self, group: dict[str, Any], items: list[_Item]) -> None:
        """One portion: all of one kind."""
        dtype = _compute_dtype(items[0].parameter)
        work = {}
        for key in ("parameter", "gradient", "exp_avg", "exp_avg_sq"):
            work[key] = _as_dtype([getattr(item, key) for item in items], dtype)
        _adamw(work["parameter"], work["gradient"], work["exp_avg"], work["exp_avg_sq"], items[0].step, group)
        for key in ("parameter", "exp_avg", "exp_avg_sq"):
            self._write_back(work[key], key, items)

    def _write_back(self, work: list[Tensor], key: str, items: list[_Item]) -> None:
        """Bring results computed in copies into their tensors: rounded, for bfloat16, with noise from each tensor's own stream."""
        targets = [getattr(item, key) for item in items]
        if work[0] is targets[0]:
            return
        if targets[0].dtype != torch.bfloat16:
            torch._foreach_copy_(targets, work)
            return
        keys = [mix(noise_key(self._seed, f"{item.name}/{key}"), item.step) for item in items]
        noise = draw_noise([item.part for item in items], keys, targets[0].device)
        flat = torch.cat([tensor.reshape(-1) for tensor in work]).float()
        rounded = round_stochastically(flat, noise).split([target.numel() for target in targets])
        torch._foreach_copy_(targets, [part.view(target.shape) for part, target in zip(rounded, targets, strict=True)])


def _compute_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _as_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The list itself if it has this dtype, else copies."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _portion_elements(device: torch.device) -> int:
    return PORTION_ELEMENTS.get(device.type, DEFAULT_PORTION_ELEMENTS)


def _portions(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """Runs of items of one kind, up to the size of a portion."""
    portion: list[_Item] = []
    size = 0
    for item in items:
        num = item.parameter.numel()
        if portion and (item.kind != portion[0].kind or size + num > _portion_elements(item.parameter.device)):
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += num
    if portion:
        yield portion


def _adamw(
    parameters: list[Tensor], gradients: list[Tensor], averages: list[Tensor], squares: list[Tensor], step: int, group: dict[str, Any]
) -> None:
    """The update in place; all lists have one dtype and device."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
    torch._foreach_lerp_(averages, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_div_(denominators, math.sqrt(1 - beta2**step))
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_addcdiv_(parameters, averages, denominators, -lr / (1 - beta1**step))
