"""Keeps an exponential moving average of the weights, on the device, and evaluates with it.

Not here: export (use `applied`). Know before editing: the averages are put in place by copying values, so the parameters, their
storage and every view of them stay what they are; whoever puts them in must take them out on any way out. Averages are of this rank's
parts of the parameters; a checkpoint sees them laid out as the parameters are, so that any mesh can go on with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import number, whole_number
from trainer_kit.exceptions import ConfigurationError, StateError

if TYPE_CHECKING:
    from trainer_kit.events import (
        BuildEnd,
        CheckpointLoaded,
        EvaluateEnd,
        EvaluateStart,
        FitStart,
        OptimizerStep,
        PredictStart,
        RunException,
    )
    from trainer_kit.parameters import ParameterRow
    from trainer_kit.trainer import Trainer


class EMA(Callback):
    """`average = decay * average + (1 - decay) * weight` after an update, for every trainable parameter; buffers stay as they are.

    decay: how much of the average stays, between 0 and 1.
    every: updates between two steps of the average.
    warmup: use `min(decay, (1 + n) / (10 + n))` in the n-th step of the average, so that it leaves the initial weights soon.
    evaluate_with_ema: evaluations see the averages.

    Averages of parameters below fp32 are kept in fp32, which would lose small changes otherwise.
    `averages` holds them by name; on a mesh each rank has those of its parts of the parameters.
    """

    def __init__(self, decay: float = 0.999, *, every: int = 1, warmup: bool = False, evaluate_with_ema: bool = True) -> None:
        self.decay = number(self, "decay", decay, at_least=0.0, below=1.0)
        self.every = whole_number(self, "every", every)
        self.warmup, self.evaluate_with_ema = warmup, evaluate_with_ema
        self.num_updates = 0
        self.averages: dict[str, torch.Tensor] = {}
        self._rows: dict[str, ParameterRow] = {}
        self._weights: dict[str, torch.Tensor] = {}  # live, local, sharing storage with the parameters
        self._twins: list[tuple[str, torch.Tensor]] = []  # of tied weights that two pipeline stages on this rank hold: the other one
        self._original: dict[str, torch.Tensor] | None = None  # the weights while the averages are in their place
        self._was_loaded = False
        self._updates_seen = 0
        self._in_for_evaluation = False

    def describe(self) -> str:
        return f"EMA(decay={self.decay}, every {self.every} updates{', warm-up' if self.warmup else ''})"

    def on_build_end(self, event: BuildEnd) -> None:
        self.averages, self._original = {}, None
        self.num_updates = self._updates_seen = 0
        self._rows, self._twins = {}, []
        for row in event.trainer.parameters.trainable():
            if self._rows.setdefault(row.name, row) is not row:
                self._twins.append((row.name, row.local.detach()))
        self._weights = {name: row.local.detach() for name, row in self._rows.items()}
        self._start_anew()

    @torch.no_grad()
    def _start_anew(self) -> None:
        for name, weight in self._weights.items():
            wide = torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype
            self.averages[name] = weight.to(wide, copy=True)

    def state_dict(self) -> dict[str, Any]:
        averages = {name: self._rows[name].laid_out(average) for name, average in self.averages.items()}
        return {"num_updates": self.num_updates, "updates_seen": self._updates_seen, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["averages"]
        differing = sorted(set(saved) ^ set(self.averages))
        if differing:
            raise ConfigurationError(f"the averages of EMA were saved for other parameters; only on one side: {differing[:5]}")
        for name, average in self.averages.items():
            row = self._rows[name]
            if row.layout.shape != tuple(saved[name].shape):
                raise ConfigurationError(f"EMA of {name}: saved with shape {tuple(saved[name].shape)}, the model has {row.layout.shape}")
            average.copy_(row.part_of(saved[name]))
        self.num_updates, self._updates_seen = state["num_updates"], state["updates_seen"]
        self._was_loaded = True

    def on_checkpoint_loaded(self, event: CheckpointLoaded) -> None:
        # A checkpoint from before this callback was used: the average starts at the weights it holds.
        if "model" in event.parts and not self._was_loaded:
            self._start_anew()
        self._was_loaded = False

    @torch.no_grad()
    def on_optimizer_step(self, event: OptimizerStep) -> None:
        self._updates_seen += 1
        if self._updates_seen % self.every:
            return
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates)) if self.warmup else self.decay
        same = [name for name, average in self.averages.items() if average.dtype == self._weights[name].dtype]
        if same:
            torch._foreach_lerp_([self.averages[n] for n in same], [self._weights[n] for n in same], 1.0 - decay)
        if len(same) < len(self.averages):
            mixed = [name for name, average in self.averages.items() if average.dtype != self._weights[name].dtype]
            averages = [self.averages[n] for n in mixed]
            torch._foreach_mul_(averages, decay)
            torch._foreach_add_(averages, [self._weights[n] for n in mixed], alpha=1.0 - decay)

    @contextmanager
    def applied(self, trainer: Trainer) -> Iterator[None]:
        """The averages in place of the weights, for `trainer.export`, `predict` or a look; one copy of the weights is held meanwhile."""
        if not self.averages:
            raise StateError("EMA has no averages before the trainer is built; call trainer.build() or trainer.fit() first")
        self._end_evaluation()
        outermost = self._original is None
        self._put_in()
        try:
            yield
        finally:
            if outermost:
                self._take_out()

    @torch.no_grad()
    def _put_in(self) -> None:
        if self._original is None:
            self._original = {name: weight.clone() for name, weight in self._weights.items()}
            for name, weight in self._weights.items():
                weight.copy_(self.averages[name])
            self._follow()

    @torch.no_grad()
    def _take_out(self) -> None:
        if self._original is not None:
            for name, weight in self._weights.items():
                weight.copy_(self._original[name])
            self._follow()
            self._original = None

    def _follow(self) -> None:
        for name, twin in self._twins:
            twin.copy_(self._weights[name])

    def on_evaluate_start(self, event: EvaluateStart) -> None:
        if self.evaluate_with_ema and self._original is None:
            self._put_in()
            self._in_for_evaluation = True

    def on_evaluate_end(self, event: EvaluateEnd) -> None:
        self._end_evaluation()

    def _end_evaluation(self) -> None:
        if self._in_for_evaluation:
            self._in_for_evaluation = False
            self._take_out()

    # An evaluation that failed has no end event; whatever comes next begins with the weights.

    def on_fit_start(self, event: FitStart) -> None:
        self._end_evaluation()

    def on_predict_start(self, event: PredictStart) -> None:
        self._end_evaluation()

    def on_exception(self, event: RunException) -> None:
        self._end_evaluation()

    def close(self) -> None:
        self._end_evaluation()
