"""How the tensors of an adapted model are called in the files of the peft library, and what `adapter_config.json` says of them.

The library puts its adapters beside the layers of the Hugging Face model, so their names follow from the mapper that loads the base
weights: where it only renames `<path>.weight`, the adapter is `base_model.model.<path>.lora_A.weight`. A weight that the mapper puts
together from others has no such place. Not here: reading and writing (`adapter_files.py`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer_kit.exceptions import CheckpointError, UnsupportedError
from trainer_kit.names import alias_table
from trainer_kit.peft.inject import Adapted, adapted_weights
from trainer_kit.peft.layers import LowRankEmbedding
from trainer_kit.peft.methods import LoRA
from trainer_kit.ties import tied_parameters
from trainer_kit.weights.mapper import StateMapper
from trainer_kit.weights.mappers import Drop, Parallel, Rename, Transpose
from trainer_kit.weights.pieces import whole

PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class StageNames:
    """The part of the files that belongs to a stage.

    stored: our name of a tensor -> its name in the files; transposed: our names of those that lie the other way round there.
    methods: path of each adapted layer in the base model -> its LoRA; saved: paths of layers that are tuned in full; others: of all others.
    tied: our names of tied weights.
    """

    stored: dict[str, str]
    transposed: frozenset[str]
    methods: dict[str, LoRA]
    saved: frozenset[str]
    others: frozenset[str]
    tied: frozenset[str]

    def export_mapper(self) -> StateMapper:
        """From our names to those of the files."""
        return Parallel([(Transpose if ours in self.transposed else Rename)(ours, theirs) for ours, theirs in self.stored.items()])

    def load_mapper(self) -> StateMapper:
        """Back. The library adds the weights of embeddings that have adapters, which are those of the base model."""
        copies = Drop([f"{PREFIX}{path}.base_layer.weight" for path in self.methods])
        return Parallel([self.export_mapper().inverse(), copies])


def stage_names(model: nn.Module, mapper: StateMapper) -> StageNames:
    """Those of the tensors of a stage that are trained. mapper: that by which its base weights load.

    Raises UnsupportedError for what the library has no place for.
    """
    adapted = list(adapted_weights(model))
    names = _renames(mapper, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    stored: dict[str, str] = {}
    transposed: set[str] = set()
    methods: dict[str, LoRA] = {}
    for item in adapted:
        path = _path(item, names)
        is_embedding = isinstance(item.lora, LowRankEmbedding)
        methods[path] = item.lora.method
        for matrix in ("A", "B"):
            suffix = f"lora_embedding_{matrix}" if is_embedding else f"lora_{matrix}.weight"
            stored[f"{item.lora_name}.{matrix}"] = f"{PREFIX}{path}.{suffix}"
        if is_embedding:
            transposed.add(f"{item.lora_name}.A")
    ties = tied_parameters(model)  # an earlier stage has those
    tuned = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in {*stored, *ties}]
    saved = {_renamed(name, names).rpartition(".")[0] for name in tuned}
    if both := sorted(saved & methods.keys()):
        raise UnsupportedError(
            f"the layer {both[0]!r} has an adapter and parameters that are tuned in full, which adapter files cannot hold; export the "
            "merged model (trainer.export), or give the layer one of the two"
        )
    stored |= {ours: f"{PREFIX}{theirs}" for ours, theirs in names.items() if theirs.rpartition(".")[0] in saved}
    paths = {theirs.rpartition(".")[0] for group in mapper.groups() for theirs in group.inputs}
    tied = frozenset({*alias_table(model).values(), *ties.values()})
    return StageNames(stored, frozenset(transposed), methods, frozenset(saved), frozenset(paths - methods.keys()), tied)


def check_ties(stages: Sequence[StageNames]) -> None:
    """Raise UnsupportedError for a tied weight in the files: the library would train one of its layers without the other."""
    tied = frozenset[str]().union(*(stage.tied for stage in stages))
    if both := sorted(tied.intersection(name for stage in stages for name in stage.stored)):
        raise UnsupportedError(
            f"{both[0]!r} is tied and tuned in full, which the peft library would take for the weight of one layer alone; export the "
            "merged model with trainer.export(path)"
        )


def _renames(mapper: StateMapper, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Our name -> the stored name, of those tensors that a mapper gives a new name and nothing else."""
    found = {}
    for group in mapper.groups():
        known = [name for name in group.outputs if name in shapes]
        if len(group.inputs) != 1 or len(known) != 1:
            continue
        (theirs,), (ours,) = group.inputs, known
        try:
            pieces = mapper.pieces({theirs: shapes[ours]}).get(ours)
        except ValueError:  # a tensor of that shape is not what the group takes, so it does more than rename
            continue
        if pieces is not None and list(pieces) == [whole(theirs, shapes[ours])]:
            found[ours] = theirs
    return found


def _renamed(name: str, names: Mapping[str, str]) -> str:
    if name not in names:
        raise UnsupportedError(
            f"{name!r} is made of several stored tensors, or of a changed one, by the mapper of the base model, so adapter files have no "
            "place for it; export the merged model with trainer.export(path)"
        )
    return names[name]


def _path(item: Adapted, names: Mapping[str, str]) -> str:
    theirs = _renamed(item.name, names)
    if not theirs.endswith(".weight") or item.weight != "weight":
        raise UnsupportedError(
            f"the adapter of {item.name!r} has no place in adapter files, where {theirs!r} is not the weight of a layer; export the merged "
            "model with trainer.export(path)"
        )
    return theirs.removesuffix(".weight")


def library_config(stages: Iterable[StageNames], base_model: str | None) -> dict[str, Any]:
    """The content of `adapter_config.json` for the adapters of all stages."""
    stages = list(stages)
    methods = {path: method for stage in stages for path, method in stage.methods.items()}
    if not methods:
        raise UnsupportedError("the model has no adapters, so there are no adapter files to write; use trainer.export(path)")
    saved = sorted(path for stage in stages for path in stage.saved)
    is_rslora = all(method.rslora for method in methods.values())
    numbers = {path: (method.rank, _alpha(method, is_rslora)) for path, method in methods.items()}
    ((rank, alpha), _), *_ = Counter(numbers.values()).most_common(1)
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": max(method.dropout for method in methods.values()),
        "use_rslora": is_rslora,
        "rank_pattern": {path: own for path, (own, _) in numbers.items() if own != rank},
        "alpha_pattern": {path: own for path, (_, own) in numbers.items() if own != alpha},
        "target_modules": _targets(methods, {path for stage in stages for path in stage.others}),
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _alpha(method: LoRA, is_rslora: bool) -> float:
    """The alpha that gives the scale of a method, where all of them are rsLoRA or none is."""
    own = method.rank if method.alpha is None else method.alpha
    alpha = float(own if method.rslora == is_rslora else method.scale * method.rank)
    return int(alpha) if alpha.is_integer() else alpha


def _targets(adapted: Iterable[str], others: Iterable[str]) -> list[str]:
    """Last parts of paths, as the library has them, where they mean no other layer; else whole paths."""
    elsewhere = {path.rpartition(".")[2] for path in others}
    return sorted({path if (last := path.rpartition(".")[2]) in elsewhere else last for path in adapted})


_CHANGES_THE_OUTPUT = (
    "use_dora", "lora_bias", "fan_in_fan_out", "use_qalora", "layer_replication", "alora_invocation_tokens", "use_bdlora", "kasa_config",
    "arrow_config", "monteclora_config",
)  # fmt: skip


def check_config(config: Mapping[str, Any], stages: Sequence[StageNames], label: str) -> None:
    """Raise CheckpointError unless the config of stored adapters means the same computation as the adapters of the model."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{label} has peft_type {config.get('peft_type')!r}, expected 'LORA'; other methods are not read")
    odd = [name for name in _CHANGES_THE_OUTPUT if config.get(name)]
    if odd or config.get("bias", "none") != "none":
        what = f"{odd[0]}={config[odd[0]]!r}" if odd else f"bias={config['bias']!r}"
        raise CheckpointError(f"{label} has {what}, which the adapters here do not have; merge them with the peft library and load that")
    for stage in stages:
        for path, method in stage.methods.items():
            rank = _of_path(config.get("rank_pattern"), path, config.get("r", 8))
            alpha = _of_path(config.get("alpha_pattern"), path, config.get("lora_alpha", 8))
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            if rank != method.rank or not math.isclose(scale, method.scale):
                raise CheckpointError(
                    f"{label} gives {path!r} the rank {rank} and the scale {scale:g}, the model was built with rank {method.rank} and "
                    f"scale {method.scale:g}; use LoRA(rank={rank}, alpha={alpha}, rslora={bool(config.get('use_rslora'))}) for it"
                )


def _of_path(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    """As the library does it: the first key that is the path, or the end of it, as a regular expression."""
    return next((value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", path)), default)
