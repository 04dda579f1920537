"""`MixtureOfExperts`: a feed-forward of which each token meets a few parts. A router chooses them, and grouped experts compute.

Shapes: N tokens, K experts per token, S = N * K copies of tokens sorted by expert, X experts, D hidden, F intermediate.
Before editing: `GroupedExperts` knows tokens sorted by expert and nothing of routing, and `dispatch` alone brings tokens to experts and
back, so that experts on other ranks are another dispatch and nothing else.
"""

# ruff: noqa: N803, N806, N815  (shape suffixes are upper case)
from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.config_parts import MoEConfig
from trainer_kit.models.layers import PLAIN, TokenInfo
from trainer_kit.models.load_balance import LoadBalance, NoBalance
from trainer_kit.parallel.additions import local_part
from trainer_kit.parallel.expert_dispatch import Dispatch, TokenRouting, combine, sort_by_expert

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext


class Routing(NamedTuple):
    """Which experts each token goes to, with which weights, and the probabilities of all of them. kept_NK: see `MoEConfig.capacity_factor`;
    None: nothing is dropped."""

    chosen_NK: torch.Tensor
    weights_NK: torch.Tensor
    probabilities_NX: torch.Tensor
    kept_NK: torch.Tensor | None = None


class Router(nn.Module):
    """A softmax over all experts, of which the largest are taken (Shazeer et al. 2017, arXiv:1701.06538).

    balance_bias: added for the choice and not in the weights (DeepSeek-V3, arXiv:2412.19437); num_routed: tokens sent to each expert since
    the last step. Both are there with `MoEConfig(balance_bias=True)`. num_dropped: copies of tokens that this rank dropped in training so
    far, with `capacity_factor`.
    """

    balance_bias: torch.Tensor | None
    num_routed: torch.Tensor | None
    num_dropped: torch.Tensor | None

    def __init__(self, width: int, config: MoEConfig, std: float) -> None:
        super().__init__()
        self.std, self.num_chosen, self.normalizes = std, config.num_experts_per_token, config.normalize_weights
        self.capacity_factor = config.capacity_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, width))
        has_bias, num_experts = config.balance_bias, config.num_experts
        self.register_buffer("balance_bias", torch.empty(num_experts, dtype=torch.float32) if has_bias else None)
        self.register_buffer("num_routed", torch.empty(num_experts, dtype=torch.int64) if has_bias else None, persistent=False)
        self.register_buffer("num_dropped", torch.empty((), dtype=torch.int64) if self.capacity_factor else None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        for buffer in (self.balance_bias, self.num_routed, self.num_dropped):
            if buffer is not None:
                buffer.zero_()

    def forward(self, x_ND: torch.Tensor) -> Routing:
        logits_NX = F.linear(x_ND, self.weight)
        # Small differences between probabilities decide, and bf16 would round them away.
        probabilities_NX = logits_NX.softmax(-1, dtype=torch.promote_types(logits_NX.dtype, torch.float32))
        preferences_NX = probabilities_NX if self.balance_bias is None else probabilities_NX + self.balance_bias
        chosen_NK = preferences_NX.topk(self.num_chosen, dim=-1).indices
        weights_NK = probabilities_NX.gather(-1, chosen_NK)
        if self.normalizes:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        kept_NK = within_capacity(chosen_NK, probabilities_NX.shape[1], self.capacity_factor) if self.capacity_factor else None
        if self.training and self.num_dropped is not None and kept_NK is not None:
            self.num_dropped += (~kept_NK).sum()
        return Routing(chosen_NK, weights_NK, probabilities_NX, kept_NK)


class GroupedExperts(nn.Module):
    """SwiGLU feed-forwards side by side: expert x has `gate_proj[x]` and `up_proj[x]` (F, D), and `down_proj[x]` (D, F)."""

    def __init__(self, width: int, config: MoEConfig, std: float, residual_std: float) -> None:
        super().__init__()
        self.std, self.residual_std, self.num_experts = std, residual_std, config.num_experts
        self.gate_proj = nn.Parameter(torch.empty(config.num_experts, config.intermediate_size, width))
        self.up_proj = nn.Parameter(torch.empty(config.num_experts, config.intermediate_size, width))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, width, config.intermediate_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_proj, std=self.std)
        nn.init.normal_(self.up_proj, std=self.std)
        nn.init.normal_(self.down_proj, std=self.residual_std)

    def forward(self, x_SD: torch.Tensor, ends_X: torch.Tensor) -> torch.Tensor:
        """Tokens sorted by expert, those of expert x up to row `ends_X[x]`, to their outputs in the same order."""
        inner_SF = F.silu(self.project("gate_proj", x_SD, ends_X)) * self.project("up_proj", x_SD, ends_X)
        return self.project("down_proj", inner_SF, ends_X)

    def project(self, name: str, x_SI: torch.Tensor, ends_X: torch.Tensor) -> torch.Tensor:
        """The product with the weight of this name; the place where adapters add theirs."""
        return grouped_linear(x_SI, local_part(self.get_parameter(name)), ends_X)


def dispatch_here(x_ND: torch.Tensor, routing: TokenRouting, experts: GroupedExperts) -> torch.Tensor:
    """A `Dispatch` for experts that are all on this rank. Nothing waits for the device, and no sum depends on an order of arrival."""
    order_S, ends_X = sort_by_expert(routing.chosen_NK, experts.num_experts)
    y_SD = experts(x_ND[order_S // routing.chosen_NK.shape[1]], ends_X)
    return combine(y_SD, order_S, routing)


class MixtureOfExperts(nn.Module):
    """Takes the place of `FeedForward`."""

    def __init__(self, config: DecoderConfig, residual_std: float, context: DistributedContext | None = None) -> None:
        super().__init__()
        assert config.moe is not None
        self.router = Router(config.hidden_size, config.moe, config.init_std)
        self.experts = GroupedExperts(config.hidden_size, config.moe, config.init_std, residual_std)
        self.dispatch: Dispatch = dispatch_here
        self.balance: NoBalance | LoadBalance = NoBalance()
        if context is not None and config.moe.is_balanced:
            self.balance = LoadBalance(config.moe, context, config.num_expert_layers)

    def forward(self, x_BTD: torch.Tensor, tokens: TokenInfo = PLAIN) -> torch.Tensor:
        routing = self.router(x_BTD.flatten(0, 1))
        if self.training:
            self.balance.observe(routing.probabilities_NX, routing.chosen_NK, tokens.is_real_BT, self.router.num_routed)
        return self.dispatch(x_BTD.flatten(0, 1), routing, self.experts).view_as(x_BTD)


def within_capacity(chosen_NK: torch.Tensor, num_experts: int, factor: float) -> torch.Tensor:
    """Which copies are among the first `factor * S / X`, rounded up, of their expert; (N, K). The capacity of GShard (Lepikhin et al. 2020,
    arXiv:2006.16668), in the order of the tokens."""
    capacity = math.ceil(factor * chosen_NK.numel() / num_experts)
    expert_S, order_S = chosen_NK.flatten().sort(stable=True)
    place_S = torch.arange(len(order_S), device=order_S.device) - torch.searchsorted(expert_S, expert_S)
    return torch.empty_like(expert_S, dtype=torch.bool).scatter_(0, order_S, place_S < capacity).view_as(chosen_NK)


def grouped_linear(x_SI: torch.Tensor, weight_XOI: torch.Tensor, ends_X: torch.Tensor) -> torch.Tensor:
    """`x @ weight[e].T` for the rows of each group e, which end before row `ends_X[e]`: (S, I) to (S, O)."""
    # Autocast casts for F.linear, though not fp64, and not for grouped_mm.
    if torch.is_autocast_enabled(x_SI.device.type) and weight_XOI.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x_SI.device.type)
        x_SI, weight_XOI = x_SI.to(dtype), weight_XOI.to(dtype)
    if can_group(x_SI, weight_XOI):
        return F.grouped_mm(x_SI, weight_XOI.transpose(1, 2), offs=ends_X.to(torch.int32))
    return loop_over_groups(x_SI, weight_XOI, ends_X)


def loop_over_groups(x_SI: torch.Tensor, weight_XOI: torch.Tensor, ends_X: torch.Tensor) -> torch.Tensor:
    """`grouped_linear` by one product per group. It waits for the device; a group without rows has a part in the graph all the same."""
    sizes = ends_X.diff(prepend=ends_X.new_zeros(1)).tolist()
    return torch.cat([F.linear(x, weight) for x, weight in zip(x_SI.split(sizes), weight_XOI, strict=True)])


def can_group(x_SI: torch.Tensor, weight_XOI: torch.Tensor) -> bool:
    """Whether `grouped_mm` takes them: rows of whole 16 bytes in inputs and outputs, 16 and 32 bits, a CPU or compute capability 8.0.

    Compiled it is for bf16 alone.
    """
    dtypes = (torch.bfloat16,) if torch.compiler.is_compiling() else (torch.bfloat16, torch.float16, torch.float32)
    is_aligned = all(size * x_SI.element_size() % 16 == 0 for size in weight_XOI.shape[1:])
    return x_SI.dtype in dtypes and x_SI.dtype == weight_XOI.dtype and is_aligned and _has_kernel(x_SI.device)


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.get_device_module(device).get_device_capability(device) >= (8, 0))
    return device.type == "cpu"
