"""Model providers: where a stage's model comes from. A module, a callable or a `ModelProvider` all become a `ModelProvider`.

Not here: devices, memory and initial values, which are `build.py`. Before editing: `initialize_model_stage` runs under the meta
device, so a provider must not need the values of the tensors it creates.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer_kit.exceptions import ConfigurationError, ModelError, UnsupportedError
from trainer_kit.names import state_names

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext
    from trainer_kit.weights.mapper import StateMapper


@dataclass(frozen=True, slots=True)
class StageInfo:
    """Which of the consecutive parts of the model is meant. One stage is the whole model."""

    index: int = 0
    num_stages: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_stages:
            raise ConfigurationError(f"StageInfo(index={self.index}, num_stages={self.num_stages}): expected 0 <= index < num_stages")

    @property
    def is_first(self) -> bool:
        """Whether this stage takes the task's inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage's outputs go to the loss."""
        return self.index == self.num_stages - 1


@dataclass(slots=True)
class StageContext:
    """What a provider's methods are told: the process, the stage, and the module once there is one."""

    context: DistributedContext
    stage: StageInfo
    module: nn.Module | None = None

    def mesh(self, domain: str) -> Any:
        """The device mesh of a domain, such as `"dense"`."""
        return self.context.mesh_for(domain)

    def built(self) -> nn.Module:
        """The module; an error before it exists."""
        if self.module is None:
            raise ModelError("the stage has no module yet; use it in the methods after initialize_model_stage")
        return self.module


class ModelProvider(ABC):
    """Subclass it to decide how a stage is built, distributed, loaded and exported."""

    @abstractmethod
    def initialize_model_stage(self, ctx: StageContext) -> nn.Module:
        """The stage's model. Called under `torch.device("meta")`: tensors have shapes and no values."""

    def parallelize_model_stage(self, ctx: StageContext) -> None:
        """Distribute `ctx.module` over the meshes, in place. One process has nothing to distribute.

        By default as `trainer_kit.parallel.default_plan` does: replicas, or FSDP per repeated block, and the model's own plan for tensor
        parallelism.
        """
        if ctx.context.world_size > 1:
            from trainer_kit.parallel import default_plan

            default_plan(ctx)

    def load_mapper(self, ctx: StageContext) -> StateMapper:
        """From the layout of a stored model state to the model's own names; by default they are the same."""
        from trainer_kit.weights.mapper import IdentityMapper

        return IdentityMapper(state_names(ctx.built()))

    def may_be_missing(self, ctx: StageContext) -> Iterable[str]:
        """Patterns of the model's names that a source model may lack: these tensors keep their initial values, which is told."""
        return ()

    def may_be_unused(self, ctx: StageContext) -> Iterable[str]:
        """Patterns of stored names that the model may have no use for."""
        return ()

    def export_mapper(self, ctx: StageContext) -> StateMapper:
        """From the model's names to the exported layout; by default the inverse of the load mapper."""
        return self.load_mapper(ctx).inverse(lossy=True)

    def hparams(self) -> dict[str, Any]:
        """Plain values for the loggers."""
        return {}


class ModuleProvider(ModelProvider):
    """A module that has its weights already; it is kept."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def initialize_model_stage(self, ctx: StageContext) -> nn.Module:
        if ctx.stage.num_stages > 1:
            raise UnsupportedError(
                f"a built {type(self.module).__name__} cannot be cut into {ctx.stage.num_stages} pipeline stages; "
                "pass a callable that builds one stage instead: lambda stage: MyModel(stage=stage)"
            )
        return self.module


class CallableProvider(ModelProvider):
    """A function, or a class of modules, that builds a stage."""

    def __init__(self, build: Callable[..., nn.Module]) -> None:
        self._build = build
        self._stage_argument = _stage_argument(build)

    def initialize_model_stage(self, ctx: StageContext) -> nn.Module:
        name, argument = _describe(self._build), self._stage_argument
        if argument is None and ctx.stage.num_stages > 1:
            raise UnsupportedError(
                f"{name} takes no StageInfo, so it builds the whole model and not one of {ctx.stage.num_stages} stages; "
                "give it a parameter `stage`"
            )
        if argument is None:
            module = self._build()
        elif argument.kind is argument.POSITIONAL_ONLY:
            module = self._build(ctx.stage)
        else:
            module = self._build(**{argument.name: ctx.stage})
        if not isinstance(module, nn.Module):
            raise ModelError(f"the model callable {name} returned {type(module).__name__}, expected an nn.Module; is a `return` missing?")
        return module


def as_model_provider(value: nn.Module | Callable[..., nn.Module] | ModelProvider) -> ModelProvider:
    """The provider that a module, a callable with or without a `StageInfo`, or a provider stands for."""
    if isinstance(value, ModelProvider):
        return value
    if isinstance(value, nn.Module):
        return ModuleProvider(value)
    if isinstance(value, type) and issubclass(value, ModelProvider):
        raise ConfigurationError(f"model_provider= is the class {value.__name__}, expected an instance: {value.__name__}()")
    build: Any = value  # a class, too, is a callable that builds modules
    if callable(build):
        return CallableProvider(build)
    raise ConfigurationError(
        f"model_provider= is a {type(value).__name__}, expected an nn.Module, a callable that returns one, or a ModelProvider"
    )


def _stage_argument(build: Callable[..., Any]) -> inspect.Parameter | None:
    """The parameter that takes the `StageInfo`: named `stage`, annotated so, or the only one without a default."""
    try:
        parameters = list(inspect.signature(build).parameters.values())
    except (TypeError, ValueError):  # some callables written in C have no signature: they take nothing
        return None
    parameters = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p for p in parameters if p.default is p.empty]
    named = [p for p in parameters if p.name == "stage" or p.annotation is StageInfo or str(p.annotation).endswith("StageInfo")]
    chosen = named[0] if named else required[0] if len(required) == 1 and required[0].kind is not inspect.Parameter.KEYWORD_ONLY else None
    if surplus := [p.name for p in required if p is not chosen]:
        raise ConfigurationError(
            f"the model callable {_describe(build)} needs the arguments {', '.join(surplus)}, but it is called with at most a StageInfo; "
            "bind them first: lambda: MyModel(...), or functools.partial"
        )
    return chosen


def _describe(build: Callable[..., Any]) -> str:
    return getattr(build, "__qualname__", None) or repr(build)
