"""`parallelize_expert`: the experts of a layer are shared out over the ranks of the expert domain, and their tokens go to where they are.

    expert domain: pp x ep_replicate x ep_shard x ep, the same ranks as those of the dense domain

Each rank of `ep` has some of the experts, FSDP cuts their parameters over `ep_shard`, and `ep_replicate` has copies. Not here: how tokens
are exchanged (`expert_dispatch.py`). Before editing: every rank of a stage has tokens of its own, and an expert sees those of all ranks of
`ep`, so its gradient is complete there and is summed, never divided, over the rest (B119).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from trainer_kit.exceptions import ConfigurationError, ModelError, UnsupportedError
from trainer_kit.mesh.contracts import clear_contracts, contracts_of, set_contract
from trainer_kit.mesh.layout import is_distributed
from trainer_kit.parallel.expert_dispatch import AllToAll, Dispatch, DispatchBackend
from trainer_kit.parallel.shard import parallelize_fsdp, parallelize_hsdp

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

DIMENSIONS = ("ep_replicate", "ep_shard", "ep")


class ExpertLayer(Protocol):
    """A module that routes tokens. experts: a module whose parameters all are (experts, ...) and which takes tokens sorted by expert, see
    `Dispatch`; it uses `parameter.to_local()` of those that are cut. dispatch: what the layer calls with (tokens, routing, experts)."""

    experts: nn.Module
    dispatch: Any


def parallelize_expert(
    layer: ExpertLayer, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy | None = None, backend: DispatchBackend = AllToAll
) -> None:
    """Share out the experts of one layer. After `parallelize_tensor` and before all other functions.

    mesh: of the expert domain, `ctx.mesh("expert")`. policy: of the FSDP unit that the experts become with ep_shard > 1.
    backend: makes the dispatch of the layer.

    Raises ConfigurationError, ModelError or UnsupportedError for what cannot be shared out, before anything is changed.
    """
    if not set(DIMENSIONS) <= set(mesh.mesh_dim_names or ()):
        raise ConfigurationError(
            f"parallelize_expert(mesh=...) got the dimensions {mesh.mesh_dim_names}, expected {', '.join(DIMENSIONS)}; "
            'take that of the expert domain, ctx.mesh("expert")'
        )
    num_experts = _checked(layer, mesh)
    _cut(layer.experts, mesh)
    _shard(layer.experts, mesh, policy)
    for parameter in layer.experts.parameters():
        set_contract(parameter, mesh["ep"], "complete")
    if mesh["ep"].size() > 1:
        dispatch: Dispatch = backend(mesh.get_group("ep"), num_experts)
        layer.dispatch = dispatch


def _checked(layer: ExpertLayer, mesh: DeviceMesh) -> int:
    """The number of experts, of a layer that can be shared out."""
    parameters = dict(layer.experts.named_parameters())
    numbers = {parameter.shape[0] if parameter.dim() else 0 for parameter in parameters.values()}
    num_ranks, what = mesh["ep"].size(), type(layer.experts).__name__
    if len(numbers) != 1:
        raise ModelError(
            f"parallelize_expert needs parameters of one number of experts along dim 0, found the shapes "
            f"{sorted({tuple(p.shape) for p in parameters.values()})} in {what}"
        )
    (num_experts,) = numbers
    if num_experts % num_ranks:
        raise ConfigurationError(
            f"ep={num_ranks} of MeshStrategy does not divide the num_experts={num_experts} of {what}; change one of them"
        )
    for name, parameter in parameters.items():
        contracts = contracts_of(parameter)
        if is_distributed(parameter) or any(contract.kind == "fsdp" for contract in contracts.values()):
            raise ModelError(f"{name!r} of {what} is distributed already; call parallelize_expert once, and before FSDP and replicas")
        if any(contract.kind == "complete" and contract.size > 1 for contract in contracts.values()):
            raise UnsupportedError(
                f"the ranks of a tensor group see the same tokens in {what}, which experts on other ranks would compute once for each of "
                'them; name its layer "sequence" in the plan of parallelize_tensor, or set ep=1'
            )
    return num_experts


def _cut(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank of `ep` its experts. All ranks have the same values, or none."""
    from torch.distributed.tensor import Shard, distribute_tensor

    along = mesh["ep"]
    for owner in experts.modules():
        for name, old in list(owner.named_parameters(recurse=False)):
            new = old
            if along.size() > 1:
                new = nn.Parameter(distribute_tensor(old.detach(), along, [Shard(0)], src_data_rank=None), requires_grad=old.requires_grad)
                vars(new).update(vars(old))
                setattr(owner, name, new)
            clear_contracts(new)


def _shard(experts: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None) -> None:
    """What is left of the domain: FSDP over `ep_shard`, and copies over `ep_replicate`."""
    replicas, shards = mesh["ep_replicate"], mesh["ep_shard"]
    if shards.size() == 1:
        for parameter in experts.parameters():
            set_contract(parameter, replicas, "partial")
            set_contract(parameter, shards, "complete")
        return
    if replicas.size() == 1:
        parallelize_fsdp(experts, shards, policy=policy)
    else:
        parallelize_hsdp(experts, mesh["ep_replicate", "ep_shard"], policy=policy)
