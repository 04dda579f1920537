"""`parallelize_tensor`: weights of chosen modules are cut over a tensor group, which shares the work on the same samples.

Not here: what such a module computes (`tensor_layers.py`), the loss over a cut vocabulary (`vocabulary_ops.py`). Before editing: all is
checked before anything is changed, and every parameter of the module leaves with a contract along the tensor dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from torch import nn

from trainer_kit.exceptions import ConfigurationError, ModelError, UnsupportedError, nearest
from trainer_kit.mesh.contracts import set_contract
from trainer_kit.mesh.layout import is_distributed
from trainer_kit.parallel.additions import Addition, addition_of
from trainer_kit.parallel.replicate import check_dimensions
from trainer_kit.parallel.sequence_random import OwnRandomNumbers
from trainer_kit.parallel.shared_inputs import SharedInputsOfParents
from trainer_kit.parallel.tensor_layers import ColumnLinear, Forward, RowLinear, TensorGroup, VocabularyEmbedding, VocabularyHead
from trainer_kit.parallel.vocabulary_ops import enable_vocabulary_ops

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Style = Literal["column", "row", "sequence", "vocabulary", "whole"]
KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "vocabulary": (nn.Linear, nn.Embedding),
    "sequence": (nn.Module,),
    "whole": (nn.Module,),
}
UNCUT = ("sequence", "whole")  # styles that leave weights as they are


def parallelize_tensor(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Style]) -> None:
    """Cut the modules that `plan` names over a mesh of one named dimension. Before FSDP, on all of the model at once.

    plan: patterns of submodule names -> "column" (a Linear whose outputs are cut), "row" (one whose inputs are), "vocabulary" (an
    Embedding, or the Linear that gives logits, cut over the vocabulary), "sequence" (a module that works on a part of the sequence) or
    "whole" (a module that gets all of the sequence as its first argument (B, T, ...), and does the same on every rank).
    Between the modules activations are plain tensors (B, T, ...). With a "sequence" module in the plan they are cut along T there, so
    that T must be a multiple of the ranks, and every module with parameters that sees them is to be named; "column" and "vocabulary"
    gather them. Without one they are whole on every rank.

    Modules that are not named stay as they are, with the same parameters and gradients on every rank. Logits are a DTensor:
    `F.cross_entropy` takes them, and `logits.full_tensor()`, called by all ranks of the group, gathers them.

    All ranks must hold the same values, or none (meta). Raises ConfigurationError, ModelError or UnsupportedError for a plan that does not
    fit, before anything is changed.
    """
    check_dimensions(mesh, "parallelize_tensor", 1)
    chosen = _chosen(module, plan)
    for name, style in chosen.items():
        _check_module(name, module.get_submodule(name), style, mesh.size())
    _check_ties(module, chosen)
    is_sequence = "sequence" in chosen.values()
    _cut_weights(module, mesh, chosen)
    _replace_forwards(module, TensorGroup(mesh, is_sequence), chosen)
    _set_contracts(module, mesh, chosen)


def _chosen(module: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """Module name -> style."""
    chosen: dict[str, Style] = {}
    of_additions = {part for addition in module.modules() if isinstance(addition, Addition) for part in addition.modules()}
    names = [name for name, part in module.named_modules() if part not in of_additions]
    for pattern, style in plan.items():
        if style not in KINDS:
            raise ConfigurationError(f"plan[{pattern!r}] of parallelize_tensor is {style!r}, not a style; {nearest(str(style), KINDS)}")
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            raise ConfigurationError(
                f"plan[{pattern!r}] of parallelize_tensor matches no submodule of {type(module).__name__}; {nearest(pattern, names)}"
            )
        for name in found:
            if chosen.setdefault(name, style) != style:
                raise ConfigurationError(f"the plan of parallelize_tensor gives {name!r} two styles, {chosen[name]!r} and {style!r}")
    for name, style in chosen.items():
        inside = [other for other in chosen if style == "sequence" and other.startswith(f"{name}." if name else "") and other != name]
        if inside:
            raise ConfigurationError(
                f'the plan of parallelize_tensor names {name!r} "sequence" and {inside[0]!r} inside of it; name the innermost modules only'
            )
    return chosen


def _check_module(name: str, module: nn.Module, style: Style, num_ranks: int) -> None:
    where = f"plan of parallelize_tensor: {name!r} is {style!r}"
    if not isinstance(module, KINDS[style]):
        expected = " or ".join(kind.__name__ for kind in KINDS[style])
        raise ConfigurationError(f"{where}, but it is a {type(module).__name__}, expected a {expected}")
    if style in UNCUT:
        return
    assert isinstance(module, (nn.Linear, nn.Embedding))
    kind = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
    if type(module).forward is not kind.forward or "weight" not in dict(module.named_parameters(recurse=False)):
        raise UnsupportedError(
            f"{where}, but {type(module).__name__} has a forward or a parametrized weight of its own, which would be passed over; name the "
            f"nn.{kind.__name__} inside of it"
        )
    if is_distributed(module.weight):
        raise ModelError(f"{where}, but its weight is distributed already; call parallelize_tensor once, and before parallelize_fsdp")
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None or module.scale_grad_by_freq):
        raise UnsupportedError(f"{where}; an Embedding with sparse, max_norm or scale_grad_by_freq cannot be cut, build it without them")
    _check_size(where, module, style, num_ranks)


def _check_size(where: str, module: nn.Linear | nn.Embedding, style: Style, num_ranks: int) -> None:
    dim = 1 if style == "row" else 0
    size = module.weight.shape[dim]
    if size < num_ranks or (dim and size % num_ranks):
        expected = f"a multiple of {num_ranks}" if dim else f"at least {num_ranks}"
        raise ModelError(
            f"{where}, but its weight has size {size} along dim {dim}, which is cut over tp={num_ranks} ranks; expected {expected}. Change "
            "the size of the module, tp of MeshStrategy, or the plan"
        )


def _check_ties(module: nn.Module, chosen: Mapping[str, Style]) -> None:
    """A parameter with several owners stays one object only if all of them cut it in the same way."""
    styles: dict[nn.Parameter, dict[str, str]] = {}
    for name, owner in module.named_modules():
        for parameter in owner.parameters(recurse=False):
            style = chosen.get(name, "whole")
            styles.setdefault(parameter, {})[name] = "column" if style == "vocabulary" else style
    for owners in styles.values():
        if len(set(owners.values())) > 1:
            found = ", ".join(f"{name!r}: {chosen[name]!r}" if name in chosen else f"{name!r}: not named" for name in owners)
            raise ConfigurationError(
                f"the plan of parallelize_tensor cuts a tied parameter in different ways ({found}); give its modules one style"
            )


def _cut_weights(module: nn.Module, mesh: DeviceMesh, chosen: Mapping[str, Style]) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placed: dict[nn.Parameter, nn.Parameter] = {}
    for name, owner in module.named_modules():
        style = chosen.get(name, "sequence")
        for attribute, old in list(owner.named_parameters(recurse=False)) if style not in UNCUT else ():
            placement = Shard(0) if style != "row" else Shard(1) if attribute == "weight" else Replicate()
            if old not in placed:
                part = distribute_tensor(old.detach(), mesh, [placement], src_data_rank=None)  # every rank has the values: nothing is sent
                placed[old] = nn.Parameter(part, requires_grad=old.requires_grad)
                vars(placed[old]).update(vars(old))
            setattr(owner, attribute, placed[old])
        if style not in UNCUT and (addition := addition_of(owner)) is not None:
            _cut_addition(addition, mesh, 1 if style == "row" else 0)


def _cut_addition(addition: Addition, mesh: DeviceMesh, dim: int) -> None:
    """Cut the parameters of the addition of a layer whose weight is cut along `dim`. Those that stay whole stay plain tensors."""
    from torch.distributed.tensor import Shard, distribute_tensor

    for name, own_dim in addition.cut_dims(dim).items():
        old = addition.get_parameter(name)
        if own_dim is not None:
            new = nn.Parameter(distribute_tensor(old.detach(), mesh, [Shard(own_dim)], src_data_rank=None), requires_grad=old.requires_grad)
            vars(new).update(vars(old))
            setattr(addition, name, new)
    if dim == 1:
        OwnRandomNumbers(addition.dropout, mesh)  # each rank has other features


def _replace_forwards(root: nn.Module, group: TensorGroup, chosen: Mapping[str, Style]) -> None:
    parents = SharedInputsOfParents(root)
    for name, style in chosen.items():
        module = root.get_submodule(name)
        if style == "sequence":
            OwnRandomNumbers(module, group.mesh)
            continue
        if style == "whole":
            module.register_forward_pre_hook(group.gather_first_argument)
            continue
        forward: Forward
        if isinstance(module, nn.Embedding):
            forward = VocabularyEmbedding(module, group)
        else:
            assert isinstance(module, nn.Linear)
            if style == "row":
                forward = RowLinear(module, group)
            elif style == "column":
                forward = ColumnLinear(module, group, parents.of(name))
            else:
                enable_vocabulary_ops()
                forward = VocabularyHead(module, group, parents.of(name))
        vars(module)["forward"] = forward


def _set_contracts(module: nn.Module, mesh: DeviceMesh, chosen: Mapping[str, Style]) -> None:
    partial: set[nn.Parameter] = set()
    for name, style in chosen.items():
        owner = module.get_submodule(name)
        if style == "sequence":
            partial.update(owner.parameters())
        elif style not in UNCUT and (addition := addition_of(owner)) is not None:
            # Each rank computes with its part of one matrix, so of the gradient of the other one, which is whole, it gets a term.
            partial.update(parameter for parameter in addition.parameters() if not is_distributed(parameter))
    for parameter in module.parameters():
        set_contract(parameter, mesh, "partial" if parameter in partial else "complete")
