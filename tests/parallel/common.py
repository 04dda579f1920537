"""What the tests on ranks share: meshes, small models in fp64, and the gradients of one process to compare with."""

import copy
import math
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_kit.mesh.contracts import contracts_of
from trainer_kit.mesh.layout import is_distributed
from trainer_kit.models import Decoder, DecoderConfig
from trainer_kit.torch_private import whole_tensor

SIZES: dict[str, Any] = {
    "vocab_size": 11, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_size": 8, "intermediate_size": 12, "max_seq_len": 8,
    "init_std": 0.3,
}  # fmt: skip


def make_mesh(**sizes: int) -> Any:
    """A mesh of all ranks with dimensions of these sizes, outermost first."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def decoder(**options: Any) -> Decoder:
    """A decoder in fp64, the same on every rank; norms that differ from one, so that their gradients are seen."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**(SIZES | options))).double()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def tokens(rank: int, batch: int = 2, length: int = 6) -> torch.Tensor:
    """The samples of a data rank."""
    return torch.randint(SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(rank))


def token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """A sum over positions of which some do not count, so that ranks add up."""
    targets = ids.roll(-1, 1).masked_fill(ids == 3, -100)
    return whole_tensor(F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"))


def gradients(model: nn.Module, losses: Any) -> dict[str, torch.Tensor]:
    """Name -> gradient of one process after the backward of each loss, on a copy of the model."""
    model = copy.deepcopy(model)
    for loss in losses:
        loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def whole_gradients(model: nn.Module, mesh: Any) -> dict[str, torch.Tensor]:
    """Name -> the gradient over all ranks, of which each must have the same. It does by hand what the synchroniser does."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        contracts = contracts_of(parameter)
        if is_distributed(parameter):
            assert gradient.placements == parameter.placements, (name, gradient.placements, parameter.placements)
            gradient = gradient.full_tensor()
        gradient = gradient.detach().clone()
        assert math.prod(size for _, size in contracts.values()) == dist.get_world_size(), (name, contracts)
        for dim, (kind, size) in contracts.items():
            if kind == "partial" and size > 1:
                dist.all_reduce(gradient, group=mesh.get_group(dim))
        found[name] = gradient
    return found


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert list(found) == list(expected)
    return max(((found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-6)).item() for name in found)


class CountCollectives(TorchDispatchMode):
    """How often each kind of collective was called, directly or by DTensor; on a CPU the backward runs in the thread of the mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(func):
            name = str(func).replace("allgather", "all_gather").replace("allreduce", "all_reduce")
            self.calls.update(kind for kind in ("all_gather", "reduce_scatter", "all_reduce") if kind in name)
        return func(*args, **(kwargs or {}))
