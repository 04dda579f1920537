"""What sets the learning rates during a run: the scheduler of a `Piecewise`, and torch's LRSchedulers behind the same few methods.

`step()` is called once after each executed update, never after a skipped one; `last_epoch` counts these calls. (The word is torch's;
the unit is the optimizer step.) A resume puts the schedule at its position; the settings of now decide its length and base rates.
"""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch

from trainer_kit.exceptions import CheckpointError, ConfigurationError, UnsupportedError
from trainer_kit.optim.curve import Curve
from trainer_kit.optim.plain_state import comparable, restored_like, to_plain


class Scheduler(Protocol):
    """What the loop and the checkpoint use."""

    last_epoch: int

    def step(self) -> None: ...
    def get_last_lr(self) -> list[float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LRSchedulerProvider(ABC):
    """Makes the scheduler, after the optimizer; for subclassing, and the base of `Piecewise`."""

    @abstractmethod
    def build(self, optimizer: torch.optim.Optimizer, total_steps: int | None) -> Scheduler:
        """total_steps: the number of optimizer steps of the whole run, if known."""

    def hparams(self) -> dict[str, Any]:
        """Plain values for the loggers."""
        return {}


class PiecewiseScheduler:
    """Sets `lr = base lr * factor` in every group, for the coming update."""

    def __init__(self, optimizer: torch.optim.Optimizer, curve: Curve) -> None:
        self._groups = optimizer.param_groups
        self._curve = curve
        self.base_lrs = base_lrs(optimizer)
        self.last_epoch = 0
        self._apply()

    def step(self) -> None:
        """After an executed update."""
        self.last_epoch += 1
        self._apply()

    def _apply(self) -> None:
        factor = self._curve.factor(self.last_epoch)
        for group, base in zip(self._groups, self.base_lrs, strict=True):
            set_lr(group, base * factor)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group as it is now, for the coming update."""
        return [float(group["lr"]) for group in self._groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the saved position. The base rates are those of the settings now; a difference is a warning."""
        self.last_epoch = saved_position(state)
        _tell_other_base_lrs(state.get("base_lrs"), self.base_lrs)
        self._apply()


class TorchScheduler:
    """A torch LRScheduler. `scheduler` is that object; `make` builds it anew on the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, total_steps: int | None, make: Callable[[], Any]) -> None:
        self._optimizer = optimizer
        self._total_steps = total_steps
        self._make = make
        self.base_lrs = base_lrs(optimizer)
        self.last_epoch = 0
        self.scheduler = self._fresh()
        self._start = comparable(to_plain(self.scheduler.state_dict()))

    def _fresh(self) -> Any:
        for group, base in zip(self._optimizer.param_groups, self.base_lrs, strict=True):
            group["initial_lr"] = base  # OneCycleLR of an earlier schedule on this optimizer puts its own there
            set_lr(group, base)
        return checked_scheduler(self._make())

    def step(self) -> None:
        """After an executed update."""
        self.last_epoch += 1
        self.scheduler.step()

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group as it is now, for the coming update."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_epoch": self.last_epoch,
            "total_steps": self._total_steps,
            "base_lrs": list(self.base_lrs),
            "start": self._start,
            "lrs": self.get_last_lr(),
            "scheduler": to_plain(self.scheduler.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the saved position: by the saved state if the settings are those of then, else by stepping a fresh scheduler there.

        torch's state holds the settings too (base rates, milestones, factors), so it would bring the old ones back.
        """
        position = saved_position(state)
        _tell_other_base_lrs(state.get("base_lrs"), self.base_lrs)
        same_run = state.get("base_lrs") == self.base_lrs and state.get("total_steps") == self._total_steps
        if same_run and state.get("start") == self._start:
            self.scheduler.load_state_dict(restored_like(self.scheduler.state_dict(), state["scheduler"]))
            for group, lr in zip(self._optimizer.param_groups, state["lrs"], strict=True):
                set_lr(group, lr)
        else:
            if same_run:
                kind = type(self.scheduler).__name__
                warnings.warn(f"lr_scheduler= ({kind}) has other settings than in the checkpoint: they are used from now on", stacklevel=2)
            self._replay(position)
        self.last_epoch = position

    def _replay(self, position: int) -> None:
        self.scheduler = self._fresh()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)`")  # no update belongs to these steps
            for _ in range(position):
                self.scheduler.step()


class CallableScheduler(LRSchedulerProvider):
    """A function of `optimizer`, or of `optimizer, total_steps`, that returns a torch LRScheduler."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._takes_total = _num_arguments(function) == 2

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int | None) -> TorchScheduler:
        arguments = (optimizer, total_steps) if self._takes_total else (optimizer,)
        return TorchScheduler(optimizer, total_steps, lambda: self._function(*arguments))

    def hparams(self) -> dict[str, Any]:
        return {"lr_scheduler": getattr(self._function, "__qualname__", type(self._function).__name__)}


def as_lr_scheduler_provider(value: Any) -> LRSchedulerProvider | None:
    """A provider from None, a provider such as `Piecewise`, or a callable that makes a torch LRScheduler."""
    if value is None or isinstance(value, LRSchedulerProvider):
        return value
    if isinstance(value, torch.optim.lr_scheduler.ReduceLROnPlateau):
        checked_scheduler(value)
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        kind = type(value).__name__
        raise ConfigurationError(
            f"lr_scheduler= is a {kind} that exists already, on an optimizer from before the build. "
            f"Pass a callable instead: lr_scheduler=lambda optimizer: {kind}(optimizer, ...)"
        )
    if callable(value):
        return CallableScheduler(value)
    raise ConfigurationError(
        f"lr_scheduler= is {value!r}, expected a schedule such as trainer_kit.optim.Piecewise().linear(1.0, steps=100) "
        "or a callable: lr_scheduler=lambda optimizer: LRScheduler"
    )


def checked_scheduler(scheduler: Any) -> Any:
    """Raises for what cannot be stepped once per update without an argument."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UnsupportedError(
            "lr_scheduler= gave a ReduceLROnPlateau: its step() needs a metric, and the schedule is stepped after every update. "
            "Use Piecewise, or lower group['lr'] of trainer.optimizer in a callback's on_evaluate_end"
        )
    missing = [name for name in ("step", "state_dict", "load_state_dict") if not callable(getattr(scheduler, name, None))]
    if missing:
        raise ConfigurationError(
            f"lr_scheduler= gave a {type(scheduler).__name__} without {', '.join(missing)}; expected a torch LRScheduler"
        )
    return scheduler


def base_lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rates of the groups without a schedule; kept in `base_lr` for schedules built later: torch's `initial_lr` can change."""
    return [group.setdefault("base_lr", float(group.get("initial_lr", group["lr"]))) for group in optimizer.param_groups]


def _tell_other_base_lrs(saved: Any, now: list[float]) -> None:
    if saved != now:
        warnings.warn(
            f"the checkpoint was made with base learning rates {saved}, the settings say {now}: these are used from now on", stacklevel=3
        )


def set_lr(group: dict[str, Any], lr: float) -> None:
    """A learning rate that is a tensor (captured graphs hold on to it) is filled, not replaced."""
    current = group["lr"]
    if isinstance(current, torch.Tensor):
        current.fill_(lr)
    else:
        group["lr"] = lr


def saved_position(state: dict[str, Any]) -> int:
    """The number of executed updates in a saved state. Raises CheckpointError if there is none."""
    position = state.get("last_epoch")
    if not isinstance(position, int) or isinstance(position, bool) or position < 0:
        raise CheckpointError(f"the schedule of the checkpoint has last_epoch={position!r}, expected the number of executed updates")
    return position


def _num_arguments(function: Callable[..., Any]) -> int:
    """1 or 2: whether the total number of steps is wanted too."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-ins without a signature
        return 1
    wants_total = "total_steps" in signature.parameters
    for count in (2, 1) if wants_total else (1, 2):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    raise ConfigurationError(f"lr_scheduler={function!r} must take (optimizer) or (optimizer, total_steps)")
