"""`adapt`: a model provider whose stages are adapted. It wraps the provider of the model that is fine-tuned.

Weights of the base model load through its own mapper, as if there were no adapters; an export writes the base model's own layout with the
adapters merged in. Before editing: stages tell each other what their patterns matched while the model is distributed, when all stages of a
rank exist and no memory is taken yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from glob import escape
from typing import Any

import torch
from torch import nn

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.team import Team
from trainer_kit.model.provider import ModelProvider, StageContext, as_model_provider
from trainer_kit.peft.inject import Outcome, adapted_weights, adapter_tensors, check_outcomes, find_matches
from trainer_kit.peft.mapping import MergedExport, WithoutTensors
from trainer_kit.peft.methods import FullTuning, LoRA, Method, describe
from trainer_kit.weights.mapper import StateMapper


def adapt(
    model: nn.Module | Callable[..., nn.Module] | ModelProvider, *methods: Method, base_dtype: torch.dtype | None = None
) -> AdaptedProvider:
    """A model provider for the Trainer, of `model` with these methods applied in their order; all that they do not train is frozen.

    model: as for the Trainer. A built module is changed in place by the build: it gets the adapters, and what is frozen stays frozen.
    base_dtype: the dtype of frozen weights, such as torch.bfloat16, which are best trained with precision="bf16-mixed"; None: as built.

    Raises ConfigurationError where a method matches nothing in any stage. A tied weight takes no adapter.
    """
    if not methods or not all(isinstance(method, (LoRA, FullTuning)) for method in methods):
        raise ConfigurationError(f"adapt(model, *methods) got the methods {methods}, expected LoRA(...) or FullTuning(...), at least one")
    if base_dtype is not None and not base_dtype.is_floating_point:
        raise ConfigurationError(f"adapt(base_dtype={base_dtype}): expected a floating-point dtype, such as torch.bfloat16")
    return AdaptedProvider(as_model_provider(model), methods, base_dtype)


class AdaptedProvider(ModelProvider):
    """What `adapt` makes."""

    def __init__(self, base: ModelProvider, methods: tuple[Method, ...], base_dtype: torch.dtype | None) -> None:
        self.base, self.methods, self.base_dtype = base, methods, base_dtype
        self._outcomes: dict[int, Outcome] = {}
        self._adapted: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def initialize_model_stage(self, ctx: StageContext) -> nn.Module:
        """The stage of the base model, with adapters."""
        module = self.base.initialize_model_stage(ctx)
        if module in self._adapted:  # a built module, for a second Trainer
            return module
        injection = find_matches(module, self.methods)
        if ctx.stage.num_stages == 1:
            check_outcomes([injection.outcome], self.methods, type(module).__name__)
        injection.apply(self.base_dtype)
        self._outcomes[ctx.stage.index] = injection.outcome
        self._adapted.add(module)
        return module

    def parallelize_model_stage(self, ctx: StageContext) -> None:
        """As the base model's provider does. With the last stage of the rank the stages learn what the others matched."""
        if ctx.stage.num_stages > 1 and ctx.stage.index == max(ctx.context.stages):
            told = Team.of(ctx.context).exchange([self._outcomes[index] for index in ctx.context.stages])
            check_outcomes([outcome for of_rank in told for outcome in of_rank], self.methods, type(ctx.built()).__name__)
        self.base.parallelize_model_stage(ctx)

    def load_mapper(self, ctx: StageContext) -> StateMapper:
        """That of the base model. It makes no adapters."""
        return WithoutTensors(self.base.load_mapper(ctx), adapter_tensors(ctx.built()))

    def export_mapper(self, ctx: StageContext) -> StateMapper:
        """That of the base model, with the adapters merged into its inputs. The live weights stay as they are."""
        return MergedExport(self.base.export_mapper(ctx), list(adapted_weights(ctx.built())))

    def may_be_missing(self, ctx: StageContext) -> Iterable[str]:
        """What the base model allows, and the adapters: stored base models have none."""
        return [*self.base.may_be_missing(ctx), *map(escape, sorted(adapter_tensors(ctx.built())))]

    def may_be_unused(self, ctx: StageContext) -> Iterable[str]:
        """What the base model allows."""
        return self.base.may_be_unused(ctx)

    def hparams(self) -> dict[str, Any]:
        """Those of the base model, and the methods."""
        return {**self.base.hparams(), **describe(self.methods)}
