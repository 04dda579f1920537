"""What makes an optimizer: the base class, and the callables that are taken in its place.

A provider is asked once, after the model is built, distributed and loaded; an optimizer made earlier would hold parameters that no
longer exist. Whatever the provider, the result is checked: exactly the parameters it was given, each once.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from typing import Any, ClassVar

import torch
from torch import nn

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.optim.group_values import remember_configured

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class OptimizerProvider(ABC):
    """Makes the optimizer from the named, trainable, deduplicated parameters in model order.

    elementwise: whether the update of an element depends on that element alone, so that it may run on a shard of a parameter.

    On a mesh the parameters are the local parts of this rank, except the sharded ones that `whole_parameters` asks for: those are
    whole, on one rank each, and on the other ranks they have no data and never a gradient. So what an update of one parameter reads
    of another one (a norm over all of them) would differ from rank to rank.
    """

    elementwise: ClassVar[bool] = False

    @abstractmethod
    def build(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        """Called once per build of the trainer."""

    def whole_parameters(self, parameters: NamedParameters) -> Set[str]:
        """The names of those whose update needs the whole parameter, where it is sharded; by default all, or none if elementwise.

        Number of dims, dtype and device of the parameters are right; their sizes are those of this rank.
        """
        return set() if self.elementwise else {name for name, _ in parameters}

    def hparams(self) -> dict[str, Any]:
        """Plain values for the loggers."""
        return {}


class CallableProvider(OptimizerProvider):
    """`optimizer=lambda parameters: torch.optim.Adam(parameters)`: the function gets the list of parameters."""

    def __init__(self, function: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self._function = function

    def build(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        optimizer = self._function([parameter for _, parameter in parameters])
        check_optimizer(optimizer, parameters, f"the callable {self.hparams()['optimizer']!r}")
        return optimizer

    def hparams(self) -> dict[str, Any]:
        return {"optimizer": getattr(self._function, "__qualname__", type(self._function).__name__)}


def as_optimizer_provider(value: Any) -> OptimizerProvider:
    """A provider from a provider, or from a callable that takes the list of parameters.

    Raises ConfigurationError for anything else; an optimizer that exists already is refused with the reason.
    """
    if isinstance(value, torch.optim.Optimizer):
        kind = type(value).__name__
        raise ConfigurationError(
            f"optimizer= is a torch {kind} that exists already: its parameters are those from before the build. "
            f"Pass a callable instead: optimizer=lambda parameters: torch.optim.{kind}(parameters, ...)"
        )
    if isinstance(value, type) and issubclass(value, OptimizerProvider):
        raise ConfigurationError(f"optimizer= is the class {value.__name__}, expected an instance: optimizer={value.__name__}()")
    if isinstance(value, OptimizerProvider):
        return value
    if callable(value):
        return CallableProvider(value)
    raise ConfigurationError(
        f"optimizer= is {value!r}, expected a provider such as trainer_kit.optim.AdamW(lr=3e-4) "
        "or a callable: optimizer=lambda parameters: torch.optim.Adam(parameters)"
    )


def build_optimizer(provider: OptimizerProvider, parameters: NamedParameters) -> torch.optim.Optimizer:
    """Build and check. Raises ConfigurationError naming a parameter that is missing from the result, foreign to it, or held twice."""
    if not parameters:
        raise ConfigurationError("the model has no trainable parameter: nothing for optimizer= to update. Is everything frozen?")
    optimizer = provider.build(parameters)
    check_optimizer(optimizer, parameters, type(provider).__name__)
    remember_configured(optimizer)
    return optimizer


def check_optimizer(optimizer: Any, parameters: NamedParameters, maker: str) -> None:
    """Raises ConfigurationError unless it is an optimizer of torch that holds exactly these parameters, each once."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"optimizer=: {maker} gave a {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    step = inspect.unwrap(type(optimizer).step)
    if any(p.default is p.empty for p in list(inspect.signature(step).parameters.values())[1:]):
        kind = type(optimizer).__name__
        raise UnsupportedError(f"{kind} takes a closure in step(), which the trainer calls without; use another optimizer=")
    label = f"the {type(optimizer).__name__} that {maker} gave as optimizer="
    names = {id(parameter): name for name, parameter in parameters}
    held: set[int] = set()
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigurationError(
                    f"{label} holds a parameter of shape {tuple(parameter.shape)} in group {index} that it was not given; "
                    "use only the parameters that the callable receives"
                )
            if id(parameter) in held:
                raise ConfigurationError(f"{label} holds {names[id(parameter)]!r} twice: it would move twice per step")
            held.add(id(parameter))
    missing = [name for key, name in names.items() if key not in held]
    if missing:
        shown = ", ".join(map(repr, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ConfigurationError(
            f"{label} lacks {shown}: they would get gradients and never move. "
            "Give every parameter to the optimizer, or freeze it with requires_grad_(False)"
        )
