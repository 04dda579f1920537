"""What keeps the experts of a mixture equally busy: a loss that is added while routers run, and the counts that move a bias.

Not here: moving the bias, which the callback `RouterBias` does once per step. Before editing: with tensor or context parallelism a router
sees a part of the sequence, and sums over tokens are taken over the ranks that have the others. The loss counts alike on tensor peers, and
gradients are those of this rank's part, which are summed later. It counts by the labels of a part on context ranks, so those sum gradients.
"""

# ruff: noqa: N803, N806  (shape suffixes are upper case: N tokens, K experts per token, X experts, B batch, T sequence)
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainer_kit.models.config_parts import MoEConfig
from trainer_kit.parallel.context import sum_over_parts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer_kit.mesh.context import DistributedContext

LOSS_NAME = "load_balancing"


class NoBalance:
    """Nothing is kept: the model runs by itself, or is not to be balanced."""

    def observe(
        self, probabilities_NX: torch.Tensor, chosen_NK: torch.Tensor, is_real_BT: torch.Tensor | None, num_routed_X: torch.Tensor | None
    ) -> None:
        """Does nothing."""


class LoadBalance:
    """Adds the load-balancing loss to the running microbatch, and counts the tokens of each expert. Padding does not count."""

    def __init__(self, config: MoEConfig, context: DistributedContext, num_layers: int) -> None:
        self._coefficient, self._context, self._num_layers = config.aux_loss_coef, context, num_layers

    def observe(
        self, probabilities_NX: torch.Tensor, chosen_NK: torch.Tensor, is_real_BT: torch.Tensor | None, num_routed_X: torch.Tensor | None
    ) -> None:
        """Called by each mixture in training, with what its router gave."""
        counted_N = self._counted(is_real_BT, len(chosen_NK))
        if num_routed_X is not None:
            # Activations that are computed again count again, in all layers and microbatches alike, so that the balance is the same.
            num_routed_X += tokens_per_expert(chosen_NK, counted_N, len(num_routed_X)).to(num_routed_X.dtype)
        if self._coefficient:
            groups = self._context.group("dense", "tp"), self._context.group("batch", "cp")
            loss = load_balancing_loss(probabilities_NX, chosen_NK, counted_N, *groups)
            self._context.add_loss(LOSS_NAME, loss / self._num_layers, self._coefficient)

    def _counted(self, is_real_BT: torch.Tensor | None, num_tokens: int) -> torch.Tensor | None:
        """Which of this rank's tokens count."""
        if is_real_BT is None:
            return None
        if is_real_BT.numel() > num_tokens:
            is_real_BT = is_real_BT.chunk(self._context.num_tensor_ranks, dim=1)[self._context.tensor_rank]
        return is_real_BT.flatten()


def tokens_per_expert(chosen_NK: torch.Tensor, counted_N: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """How many tokens were sent to each expert, (X,) in float32."""
    chosen = chosen_NK.flatten()
    ones = torch.ones_like(chosen, dtype=torch.float32)
    if counted_N is not None:
        ones = ones * counted_N.repeat_interleave(chosen_NK.shape[1])
    return torch.zeros(num_experts, dtype=torch.float32, device=chosen.device).scatter_add_(0, chosen, ones)


def load_balancing_loss(
    probabilities_NX: torch.Tensor,
    chosen_NK: torch.Tensor,
    counted_N: torch.Tensor | None = None,
    tensor_group: ProcessGroup | None = None,
    context_group: ProcessGroup | None = None,
) -> torch.Tensor:
    """`X * sum over experts of (tokens sent to it per token) * (its mean probability)`, at least K, when all are used equally.

    Equations 4 to 6 of Switch Transformer (Fedus et al. 2021, arXiv:2101.03961), with K experts per token as transformers'
    `load_balancing_loss_func` has it, for one layer. (Given several, that takes means over the layers before it multiplies, so that one
    layer may make up for another; here losses of layers are averaged.) tensor_group, context_group: ranks that have the other tokens of the
    samples.
    """
    num_experts = probabilities_NX.shape[1]
    counted = probabilities_NX if counted_N is None else probabilities_NX * counted_N.unsqueeze(-1)
    own_X = counted.sum(0)
    num_tokens = own_X.new_tensor(len(chosen_NK)) if counted_N is None else counted_N.sum().to(own_X.dtype)
    sums = torch.cat((tokens_per_expert(chosen_NK, counted_N, num_experts).to(own_X.dtype), own_X, num_tokens[None]))
    if context_group is not None:
        sums = sum_over_parts(sums, context_group)
    if tensor_group is not None:
        of_group = sums.detach().clone()
        torch.distributed.all_reduce(of_group, group=tensor_group)
        sums = of_group + (sums - sums.detach())  # the value of all ranks, the gradient of this one
    sent_X, probability_X, num_tokens = sums[:num_experts], sums[num_experts:-1], sums[-1].clamp(min=1)
    return num_experts * (sent_X / num_tokens * probability_X / num_tokens).sum()
