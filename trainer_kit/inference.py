"""Evaluation and prediction: forward-only passes that leave everything of a run as it was.

Random streams, train and eval modes, gradients and the position of the training data are the same afterwards, however the pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainer_kit import assembly, events, loop
from trainer_kit.callback import Dispatcher
from trainer_kit.config import TrainerConfig
from trainer_kit.data import DataProvider, DataStream, as_provider, map_tensors
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.lifecycle import tell
from trainer_kit.mesh import DistributedContext
from trainer_kit.model.modes import eval_modes
from trainer_kit.random_state import forked
from trainer_kit.records import Records
from trainer_kit.run_state import RunState
from trainer_kit.task import Task
from trainer_kit.torch_private import whole_tensor
from trainer_kit.weights.buffers import share_buffers


@dataclass
class Inference:
    """Runs the model over other data, or over the training data.

    pause_training_data: gives a provider back, set up, if the data is that of the training, whose reading then goes on where it was.
    """

    config: TrainerConfig
    context: DistributedContext
    model: assembly.BuiltModel
    pause_training_data: Callable[[Any], DataProvider | None]
    run: RunState
    records: Records
    dispatcher: Dispatcher

    def evaluate(self, data: Any, task: Task, name: str) -> dict[str, float]:
        """The weighted mean losses and metrics over one pass."""
        with self._phase("evaluation"):
            self.records.flush()
            self.dispatcher.emit(events.EvaluateStart)
            with self._forward_only(data) as stream:
                limit = self.config.dev_steps or self.config.limit_evaluate_packs
                values = loop.evaluate(stream, self.model.runner, task, self.context, prefix=name, limit=limit)
            self.dispatcher.emit(events.EvaluateEnd, values=values)
        if f"{name}/loss" not in values:
            raise ConfigurationError("evaluate(data): the data gave no sample that counts, so there is no loss; is it empty or exhausted?")
        return values

    def predict(self, data: Any, task: Task, each: Callable[[Any], None]) -> None:
        """Give the host outputs of each microbatch to `each`, in order; on rank 0 those of all ranks, elsewhere none."""
        with self._phase("prediction"):
            self.dispatcher.emit(events.PredictStart)
            with self._forward_only(data) as stream:
                for outputs in loop.predict(stream, self.model.runner, task, limit=self.config.dev_steps):
                    for ready in self._of_all_ranks([map_tensors(lambda t: whole_tensor(t.detach()).cpu(), output) for output in outputs]):
                        each(ready)
            self.dispatcher.emit(events.PredictEnd)

    def _of_all_ranks(self, outputs: list[Any]) -> list[Any]:
        """The outputs of one pack in the order of the data ranks, whose samples follow one another in this order."""
        if self.context.world_size == 1:
            return outputs
        has_them = self.context.is_counted and self.context.context_rank == 0  # joined on all context ranks, as a collective
        parts = self.context.host.gather(outputs if has_them else [])
        return [output for part in parts or () for output in part]

    @contextmanager
    def _phase(self, phase: Literal["evaluation", "prediction"]) -> Iterator[None]:
        before, self.run.phase = self.run.phase, phase
        try:
            yield
        except BaseException as error:
            if before == "idle":  # inside a fit, the fit tells it
                tell(error, self.dispatcher, self.run, self.context.failures.report)
            raise
        finally:
            self.run.phase = before

    @contextmanager
    def _forward_only(self, data: Any) -> Iterator[DataStream]:
        provider = self.pause_training_data(data)
        if provider is None:
            provider = as_provider(data)
            provider.setup(self.context, self.config.seed)
        stream = assembly.open_stream(provider, self.context, self.config, training=False)
        share_buffers(self.model.table.buffers, self.context)  # the samples of all ranks are seen by one model
        try:
            with forked(self.context.device), eval_modes(self.model.stages), torch.no_grad():
                yield stream
        finally:
            stream.close()
