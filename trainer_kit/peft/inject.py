"""How the methods of a fine-tuning change a model, in place: everything is frozen, then each method adds or unfreezes what it matches.

It runs on the meta device before the build distributes anything, or on a module that has its weights. Layers keep their class, and their
tensors keep their names; an adapter is the submodule `lora` of its layer. With pipeline stages a pattern need not match in each of them:
what one did not match is told, and `provider.py` looks at all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from trainer_kit.exceptions import ConfigurationError, ModelError, UnsupportedError, nearest
from trainer_kit.mesh.layout import is_distributed
from trainer_kit.models.experts import GroupedExperts
from trainer_kit.names import alias_table
from trainer_kit.parallel.additions import addition_of, attach
from trainer_kit.peft.experts import attach_to_experts
from trainer_kit.peft.layers import LowRank, LowRankEmbedding, LowRankLinear
from trainer_kit.peft.methods import LoRA, Method
from trainer_kit.ties import tied_parameters

SUBMODULE = "lora"
EXPERT_WEIGHTS = ("gate_proj", "up_proj", "down_proj")


class Site(NamedTuple):
    """A weight that can be adapted: the module that owns it, its name there, and the names under which patterns find it."""

    owner: nn.Module
    weight: str
    owner_name: str
    names: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """That of the weight in the model."""
        return f"{self.owner_name}.{self.weight}" if self.owner_name else self.weight

    def has_name_like(self, pattern: str) -> bool:
        """Whether a pattern means it."""
        return any(fnmatchcase(name, pattern) for name in self.names)


class Adapted(NamedTuple):
    """A weight that has an adapter, with its name and that of the adapter in the model."""

    owner: nn.Module
    weight: str
    name: str
    lora: LowRank
    lora_name: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stage tells the others. unmatched: patterns, with the index of their method; known: names that patterns could have meant;
    adapted: names of weights with adapters; tied: names of tied weights, also those that the stage says an earlier one has for them."""

    unmatched: list[tuple[int, str]] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    adapted: set[str] = field(default_factory=set)
    tied: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Injection:
    """What the methods will do to a stage, found before anything is changed."""

    model: nn.Module
    adapters: Sequence[tuple[Site, LoRA]]
    unfrozen: Sequence[nn.Parameter]
    outcome: Outcome

    def apply(self, base_dtype: torch.dtype | None = None) -> None:
        """Freeze the model, add the adapters, unfreeze what is tuned in full. base_dtype: that of what stays frozen."""
        self.model.requires_grad_(False)
        for parameter in self.unfrozen:
            parameter.requires_grad_(True)
        for site, method in self.adapters:
            _attach(site, method)
        _call_layers_of_encoders(self.model)
        for parameter in self.model.parameters() if base_dtype is not None else ():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(base_dtype)


def find_matches(model: nn.Module, methods: Sequence[Method]) -> Injection:
    """What the methods match in a stage, in their order."""
    _check(model)
    sites, parameters = list(_sites(model)), dict(model.named_parameters(remove_duplicate=False))
    aliases, ties = alias_table(model), tied_parameters(model)
    outcome = Outcome(tied={*aliases, *aliases.values(), *ties, *ties.values()})
    adapters: dict[str, tuple[Site, LoRA]] = {}
    unfrozen: dict[str, nn.Parameter] = {}
    for index, method in enumerate(methods):
        found: Mapping[str, Sequence[object]]
        if isinstance(method, LoRA):
            found = {pattern: [site for site in sites if site.has_name_like(pattern)] for pattern in method.targets}
            for site in [site for site in sites if any(map(site.has_name_like, method.targets))]:
                _check_site(site, adapters)
                adapters[site.full_name] = site, method
            known = {name for site in sites for name in site.names}
        else:
            found = {pattern: _parameters_like(pattern, parameters, ties) for pattern in method.patterns}
            unfrozen.update({name: parameters[name] for pattern in method.patterns for name in _parameters_like(pattern, parameters, ties)})
            known = {*parameters, *ties.values()}
        if unmatched := [(index, pattern) for pattern, matches in found.items() if not matches]:
            outcome.unmatched.extend(unmatched)
            outcome.known.update(_templates(known))
    outcome.adapted.update(adapters)
    return Injection(model, list(adapters.values()), list(unfrozen.values()), outcome)


def check_outcomes(outcomes: Iterable[Outcome], methods: Sequence[Method], model: str) -> None:
    """Raise for a pattern that no stage matched, and for adapters of tied weights. outcomes: of all stages."""
    outcomes = list(outcomes)
    unmatched = set(outcomes[0].unmatched).intersection(*(outcome.unmatched for outcome in outcomes))
    for index, pattern in sorted(unmatched):
        known = set().union(*(outcome.known for outcome in outcomes))
        kind = "layer that can be adapted" if isinstance(methods[index], LoRA) else "parameter or module"
        raise ConfigurationError(
            f"the pattern {pattern!r} of {type(methods[index]).__name__} matches no {kind} of {model}, so nothing would be trained by it; "
            f"{nearest(pattern, known)}"
        )
    tied = set().union(*(outcome.tied for outcome in outcomes))
    adapted = set().union(*(outcome.adapted for outcome in outcomes))
    if both := sorted(tied & adapted):
        raise UnsupportedError(
            f"LoRA matches {both[0]!r}, a tied weight: a merged export would change it for the other layer too. Take it out of targets=, "
            "untie the model, or train it whole with FullTuning"
        )


def adapted_weights(model: nn.Module) -> Iterator[Adapted]:
    """All weights that have adapters, in the order of the model. Names are those of an uncompiled model."""
    for path, module in model.named_modules():
        if not isinstance(module, LowRank):
            continue
        owner_path, _, inner = f".{path}".rpartition(f".{SUBMODULE}")
        owner_path, weight = owner_path.removeprefix("."), inner.removeprefix(".") or "weight"
        name = f"{owner_path}.{weight}" if owner_path else weight
        yield Adapted(model.get_submodule(owner_path), weight, name.replace("_orig_mod.", ""), module, path.replace("_orig_mod.", ""))


def adapter_tensors(model: nn.Module) -> frozenset[str]:
    """The names of the parameters of all adapters."""
    return frozenset(f"{adapted.lora_name}.{matrix}" for adapted in adapted_weights(model) for matrix in ("A", "B"))


def _sites(model: nn.Module) -> Iterator[Site]:
    unused = {part for module in model.modules() if isinstance(module, nn.MultiheadAttention) for part in module.children()}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and module not in unused:  # that reads the weights and does not call its layers
            yield Site(module, "weight", name, (name,))
        elif isinstance(module, GroupedExperts):
            for weight in EXPERT_WEIGHTS:
                yield Site(module, weight, name, (name, f"{name}.{weight}" if name else weight))


def _check_site(site: Site, adapters: Collection[str]) -> None:
    if site.full_name in adapters:
        raise ConfigurationError(
            f"{site.full_name!r} is matched by a second LoRA, but a weight has one adapter; make the patterns of targets= disjoint"
        )
    if hasattr(site.owner, SUBMODULE):
        raise ModelError(f"{site.owner_name!r} has an attribute {SUBMODULE!r} of its own, which is the place of its adapter; rename it")


def _attach(site: Site, method: LoRA) -> None:
    owner = site.owner
    if isinstance(owner, GroupedExperts):
        attach_to_experts(owner, SUBMODULE, site.weight, method)
    elif isinstance(owner, nn.Embedding):
        attach(owner, SUBMODULE, LowRankEmbedding(owner, method))
    else:
        assert isinstance(owner, nn.Linear)
        attach(owner, SUBMODULE, LowRankLinear(owner, method))


def _call_layers_of_encoders(model: nn.Module) -> None:
    """In eval mode torch's encoder layers read the weights of their two linear layers in place of calling them, and adapters were lost."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(map(addition_of, (module.linear1, module.linear2))):
            module.activation_relu_or_gelu = 0  # of no activation that the fused kernel knows
        elif isinstance(module, nn.TransformerEncoder) and any(map(addition_of, module.modules())):
            module.use_nested_tensor = False  # which is for the fused kernel alone


def _parameters_like(pattern: str, names: Iterable[str], ties: Mapping[str, str]) -> list[str]:
    return [name for name in names if _names_it(name, pattern) or _names_it(ties.get(name, name), pattern)]


def _names_it(name: str, pattern: str) -> bool:
    """Whether a pattern means a parameter, or one of the modules around it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _templates(names: Iterable[str]) -> set[str]:
    """Names with a star for each number, so that a hundred layers are one name."""
    return {re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names}


def _check(model: nn.Module) -> None:
    if any(isinstance(module, LowRank) for module in model.modules()):
        raise ModelError(f"this {type(model).__name__} has adapters already; adapt a model once, with all methods, and build a new one")
    if cut := [name for name, parameter in model.named_parameters() if is_distributed(parameter)]:
        raise UnsupportedError(
            f"{cut[0]!r} is distributed already, and adapters go in before that; write a ModelProvider whose parallelize_model_stage "
            "distributes the model, and adapt that"
        )
