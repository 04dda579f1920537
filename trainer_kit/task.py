"""What is trained: how a microbatch becomes model inputs, and a model output becomes a loss.

`Task` is for subclassing; `SupervisedTask` and `CausalLMTask` (in `causal_lm.py`) cover the common cases and declare their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.exceptions import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext
    from trainer_kit.metrics import Metric
    from trainer_kit.parallel.context import SequenceParts

Weight = float | int | torch.Tensor


@dataclass(slots=True)  # not frozen: that makes it several times as expensive, and there is one per microbatch
class ForwardInputs:
    """What one microbatch gives to the model and keeps for the loss.

    inputs: what the model is called with (a mapping as keywords, a tuple as positional arguments, `Args` for both).
    shared: data for every stage, such as position ids; for models of the stage form `forward(inputs, shared)`.
    state: what the loss needs besides the output, such as the targets.
    weight: how much the microbatch counts; a mapping declares one weight per loss term. A host number is best; a one-element
        tensor works too, and is never waited for.
    """

    inputs: Any
    shared: Any = None
    state: Any = None
    weight: Weight | Mapping[str, Weight] | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """A scalar loss that is a mean, and the weight of that mean: a number or a one-element tensor."""

    loss: torch.Tensor
    weight: Weight | None = None


@dataclass(frozen=True)
class Args:
    """Positional and keyword arguments of a model in one: `ForwardInputs(inputs=Args(x, mask=m))`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)


class Task:
    """Subclass it: `build_forward_inputs` and `compute_loss` are what training needs, the rest is optional."""

    def build_forward_inputs(self, batch: Any) -> ForwardInputs:
        """Turn one microbatch, on the device, into model inputs. Called for every microbatch of the pack before the first forward."""
        raise NotImplementedError(f"{type(self).__name__} must define build_forward_inputs(batch) -> ForwardInputs")

    def compute_loss(self, pipeline_results: Any, state: Any) -> torch.Tensor | Loss | Mapping[str, torch.Tensor | Loss]:
        """The mean loss of one microbatch from the output of the last stage.

        A bare tensor has the declared weight, or 1; `Loss(loss, weight)` brings its own. A mapping holds several terms, the first
        being the main one; they share its weight unless `ForwardInputs.weight` declares one per term.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute_loss(pipeline_results, state)")

    def metrics(self) -> dict[str, Metric]:
        """Name -> metric; called once for training and once per evaluation."""
        return {}

    def update_metrics(self, metrics: dict[str, Metric], pipeline_results: Any, state: Any) -> None:
        """Add one microbatch to the metrics. Runs without gradients."""

    def process_outputs(self, pipeline_results: Any, state: Any) -> Any:
        """What `predict` returns for one microbatch; a tensor or pytree whose first dim is the sample."""
        return pipeline_results

    def cut_sequences(self, given: ForwardInputs, parts: SequenceParts) -> ForwardInputs:
        """With context parallelism (cp_shard, cp_replicate): this rank's part of what `build_forward_inputs` gave for whole sequences.

        `parts.take(x)` is the part of a tensor (B, T, ...). Labels must be shifted before. The weight is that of the part: those of all
        parts add up to the weight of the microbatch, and 0 is right where no label counts.
        """
        raise UnsupportedError(
            f"cp={parts.num_ranks} of MeshStrategy cuts sequences, but {type(self).__name__} does not say how to cut what it made of a "
            "microbatch; give it a method cut_sequences(self, given, parts) that returns ForwardInputs with parts.take(...) of each tensor "
            "and the weight of this part, or set cp_shard=1 and cp_replicate=1"
        )

    def join_sequences(self, outputs: Any, parts: SequenceParts) -> Any:
        """The whole of what `process_outputs` made of a part, on all context ranks, which call it together. By default every tensor in a
        mapping, tuple or list is (B, T / ranks, ...), and is gathered along its second dim."""
        return parts.gather_all(outputs)

    def setup(self, context: DistributedContext) -> None:
        """Called once by the build, before the model."""

    def finalize(self) -> None:
        """Called by `trainer.close()`."""

    def hparams(self) -> dict[str, Any]:
        """Plain values for the loggers."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What must survive a resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        if state:
            raise ConfigurationError(f"{type(self).__name__} was saved with state {sorted(state)} but does not override load_state_dict")


def checked_task(task: object) -> Task:
    """The task, if it is one. Raises ConfigurationError."""
    if isinstance(task, Task):
        return task
    hint = "; pass an instance, not the class" if isinstance(task, type) else ""
    raise ConfigurationError(f"task= is {task!r}, expected an instance of trainer_kit.Task{hint}")


class SupervisedTask(Task):
    """Inputs and targets: `loss_fn(outputs, targets)` must be a mean over the samples; a microbatch weighs its number of samples.
    That is dim 0 of the targets, or of the tensors in a mapping or sequence of them; any other sequence has an entry per sample.

    A batch is a pair `(inputs, targets)`, or a mapping that holds them under `inputs` and `targets` (names can be given).
    `metrics` maps names to metric factories, whose `update` gets `(outputs, targets)`; or to pairs of a factory and a function
    `(outputs, targets) -> arguments of update`.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        inputs: str | int = 0,
        targets: str | int = 1,
        metrics: Mapping[str, Callable[[], Metric] | tuple[Callable[[], Metric], Callable[[Any, Any], Any]]] | None = None,
    ) -> None:
        if not callable(loss_fn):
            raise ConfigurationError(f"loss_fn= is {loss_fn!r}, expected a callable such as torch.nn.functional.cross_entropy")
        self.loss_fn = loss_fn
        self._inputs, self._targets = inputs, targets
        self._metrics = {name: given if isinstance(given, tuple) else (given, _both) for name, given in (metrics or {}).items()}

    def build_forward_inputs(self, batch: Any) -> ForwardInputs:
        try:
            inputs, targets = batch[self._inputs], batch[self._targets]
        except (KeyError, IndexError, TypeError) as error:
            found = f"a mapping with {sorted(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise ConfigurationError(
                f"SupervisedTask takes batch[{self._inputs!r}] and batch[{self._targets!r}], but the batch is {found}; "
                "set inputs= and targets= of SupervisedTask to its names"
            ) from error
        return ForwardInputs(inputs=inputs, state=targets, weight=_num_samples(targets))

    def compute_loss(self, pipeline_results: Any, state: Any) -> torch.Tensor:
        return self.loss_fn(pipeline_results, state)

    def metrics(self) -> dict[str, Metric]:
        return {name: factory() for name, (factory, _) in self._metrics.items()}

    def update_metrics(self, metrics: dict[str, Metric], pipeline_results: Any, state: Any) -> None:
        for name, (_, arguments) in self._metrics.items():
            given = arguments(pipeline_results, state)
            metrics[name].update(*given) if isinstance(given, tuple) else metrics[name].update(given)


def _num_samples(targets: Any) -> int:
    size = _dim_0(targets)
    if size is None and isinstance(targets, Sized) and not isinstance(targets, (torch.Tensor, Mapping)):
        size = len(targets)
    if size is None:
        found = f"a tensor of shape {tuple(targets.shape)}" if isinstance(targets, torch.Tensor) else repr(targets)
        raise ConfigurationError(
            f"SupervisedTask weighs a microbatch by its number of samples, but its targets are {found}; "
            "expected a tensor with the samples in dim 0, a mapping of those, or a sequence"
        )
    return size


def _dim_0(targets: Any) -> int | None:
    if isinstance(targets, torch.Tensor):
        return targets.shape[0] if targets.dim() else None
    if isinstance(targets, Mapping):
        return next((size for size in map(_dim_0, targets.values()) if size is not None), None)
    if isinstance(targets, (list, tuple)):
        sizes = {entry.shape[0] for entry in targets if isinstance(entry, torch.Tensor) and entry.dim()}
        return sizes.pop() if len(sizes) == 1 else len(targets)
    return None


def _both(outputs: Any, targets: Any) -> tuple[Any, Any]:
    return outputs, targets
