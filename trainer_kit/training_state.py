"""`TrainingState`: everything that a run needs to go on, collected from its owners and given back to them.

Keys are global parameter names, never ranks or stages, so that any mesh can go on. What each data rank has for itself (metrics and values
of the running record), and each of its pipeline ranks (random streams), has a key of its own (`checkpoint/per_rank.py`); the other plain
values are those of rank 0, and of the first rank of a stage what only that stage has. Random streams are restored last, because restoring
the others may draw.

Before editing: `collect` communicates nothing, `collect_together` and `restore` are collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer_kit.callback import Callback
from trainer_kit.checkpoint.checks import TensorRecord
from trainer_kit.checkpoint.equality import check_equal_on_ranks
from trainer_kit.checkpoint.identity import check_identity
from trainer_kit.checkpoint.loader import load
from trainer_kit.checkpoint.manifest import Manifest, read_manifest
from trainer_kit.checkpoint.per_rank import decode_state, encode_state, rank_key, rank_keys, share_of
from trainer_kit.checkpoint.tree import flatten_state, merge_values, unflatten_state
from trainer_kit.description import shown_once
from trainer_kit.exceptions import CheckpointError, ConfigurationError, nearest
from trainer_kit.loop import TrainingLoop
from trainer_kit.mesh import DistributedContext
from trainer_kit.mesh.layout import is_distributed, like, local_of
from trainer_kit.mesh.team import Team
from trainer_kit.metrics.merge import load_merged
from trainer_kit.optim.group_values import group_values, load_group_values
from trainer_kit.optim.materialize import materialize_state
from trainer_kit.optim.state import (
    check_optimizer_state,
    load_optimizer_state,
    merge_optimizer_values,
    optimizer_templates,
    optimizer_tensors,
    optimizer_values,
)
from trainer_kit.parameters import ParameterTable
from trainer_kit.random_state import RandomStreams
from trainer_kit.task import Task
from trainer_kit.ties import TiedWeights
from trainer_kit.weights.buffers import share_buffers

logger = logging.getLogger("trainer_kit")

PARTS = ("model", "optimizer", "schedule", "data", "random", "callbacks", "task")
OF_STAGES = ("modules", "callbacks")  # parts in which each pipeline stage has entries of its own
OPTIMIZER = "optimizer/tensors/"
SAME_ON_RANKS = ("modules/", "callbacks/", "task/state/")  # what users keep; one rank's is taken for all


@dataclass
class TrainingState:
    """The parts of a run that are saved. `identity` says which run it is; `trainable_only` leaves frozen weights out."""

    loop: TrainingLoop
    table: ParameterTable
    ties: TiedWeights
    random: RandomStreams
    callbacks: Sequence[Callback]
    task: Task
    identity: dict[str, Any]
    context: DistributedContext
    trainable_only: bool = False

    def collect(self) -> tuple[dict[str, torch.Tensor], Any]:
        """Live tensors of this rank by key, and JSON-able values; nothing is copied."""
        return self._collect(optimizer_values(self.loop.update.optimizer, self.loop.update.parameters), self.loop.stream.state_dict())

    def collect_together(self) -> tuple[dict[str, torch.Tensor], Any]:
        """`collect` for a save: on a mesh with what the ranks must know of each other, after buffers were made the same.

        Raises CheckpointError, on every rank, if tensors that users keep differ between ranks.
        """
        values = optimizer_values(self.loop.update.optimizer, self.loop.update.parameters)
        if self.loop.update.is_spread:
            values = merge_optimizer_values(self.context.host.exchange(values))
        share_buffers(self.table.buffers, self.context)
        tensors, content = self._collect(values, self.loop.stream.state_of_all_ranks())
        if self.context.num_pipeline_ranks > 1:
            is_first = self.context.rank == self.context.first_rank_of_stage
            of_ranks = self.context.host.exchange({part: content[part] for part in OF_STAGES} if is_first else None)
            content |= merge_values([values for values in of_ranks if values is not None])
        check_equal_on_ranks({name: tensor for name, tensor in tensors.items() if name.startswith(SAME_ON_RANKS)}, self.context)
        return tensors, content

    def _collect(self, of_optimizer: dict[str, Any], of_data: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
        loop, run = self.loop, self.loop.run
        tensors, values = flatten_state(
            {
                "progress": {
                    "step": run.step,
                    "epoch": run.epoch,
                    "total_steps": run.total_steps,
                    "skipped": loop.guard.num_skipped,
                    **self._num_ranks(),
                },
                "modules": {name: module.get_extra_state() for name, module in self.table.extra_states().items()},
                "optimizer": {"values": of_optimizer, "groups": group_values(self.loop.update.optimizer)},
                "schedule": None if loop.lr_scheduler is None else loop.lr_scheduler.state_dict(),
                "data": of_data,
                "callbacks": {callback.state_key: callback.state_dict() for callback in self._others()},
                "task": {"state": self.task.state_dict()},
            }
        )
        of_model = self.table.tensors(trainable_only=self.trainable_only)
        tensors |= {f"model/{name}": tensor for name, tensor in of_model.items()}
        live = optimizer_tensors(self.loop.update.optimizer, self.loop.update.parameters)
        tensors |= {f"{OPTIMIZER}{name}": tensor for name, tensor in live.items()}
        return tensors | self._of_this_rank(), values

    def _of_this_rank(self) -> dict[str, torch.Tensor]:
        """What the peers of this rank do not save for it."""
        found = {}
        if self.context.tensor_rank == 0:
            found[rank_key("random", self.context.random_rank)] = encode_state(self.random.state_dict())
        if self.context.is_counted:
            metrics = {name: metric.state_dict() for name, metric in self.loop.metrics.items() if hasattr(metric, "state_dict")}
            running = {"metrics": metrics, "records": self.loop.records.state_dict()}
            found[rank_key("task", self.context.data_rank)] = encode_state(running)
        return found

    def restore(self, path: str, parts: Sequence[str] | None, *, verify: bool = True) -> int:
        """Bring the run to the state in the folder `path`; returns its number of finished steps.

        parts: restore these alone, and leave the step counter; without it everything must fit.
        """
        for part in parts or ():
            if part not in PARTS:
                raise ConfigurationError(f"load_checkpoint(parts=...) has {part!r}; {nearest(part, PARTS)}")
        manifest = read_manifest(path, verify=verify, context=self.context)
        if parts is None:
            for line in check_identity(manifest.identity, self.identity, path):
                self._remark("another setting: %s", line)
        chosen = PARTS if parts is None else tuple(parts)
        if "model" in chosen:
            chosen = (*chosen, "modules")
        if "optimizer" in chosen:
            materialize_state(self.loop.update.optimizer)
        # Before anything is loaded, on every rank: a refused resume leaves the model as it was.
        templates, mine, others = Team.of(self.context).everywhere(lambda: self._templates(manifest, chosen))
        prefixes = [f"{part}/" for part in chosen]
        values = load(path, templates, prefixes=prefixes, manifest=mine, verify=verify, context=self.context)
        found = {part: unflatten_state(templates, values[part], without=others) for part in (*chosen, "progress") if part in values}
        self._apply(found, templates, chosen, everything=parts is None)
        return manifest.step

    def check_identity(self, path: str) -> list[str]:
        """Raise CheckpointError if the checkpoint at `path` is of another run; returns a line for each other difference."""
        return check_identity(read_manifest(path).identity, self.identity, path)

    def _templates(self, manifest: Manifest, chosen: Sequence[str]) -> tuple[dict[str, torch.Tensor], Manifest, set[str]]:
        """Tensors to load into, the checkpoint as far as it concerns this rank, and the keys of the rest."""
        live = self.collect()[0]
        others = self._of_others(manifest, live)
        mine = manifest.without(others)
        templates: dict[str, torch.Tensor] = {}
        if "optimizer" in chosen:
            templates |= self._optimizer_templates(mine)
        if "model" in chosen:
            of_model = self.table.tensors(trainable_only=self.trainable_only)
            templates |= {f"model/{name}": tensor for name, tensor in of_model.items()}
        for name, record in mine.tensors.items():
            part = name.split("/")[0]
            if part in chosen and part not in ("model", "optimizer"):
                templates[name] = _new_tensor(record, live.get(name))
        return templates, mine, others

    def _of_others(self, manifest: Manifest, live: Mapping[str, torch.Tensor]) -> set[str]:
        """The keys that do not concern this rank: of other ranks, of parameters that are updated on these, and of other stages."""
        num_saved, num_random = _num_saved(manifest)
        keys = {*rank_keys("task", num_saved), *rank_keys("random", num_random)}
        keys -= {rank_key("task", rank) for rank in self._share(num_saved)}
        if (num_saved, num_random) == (self.context.num_data_ranks, self.context.num_random_ranks):
            keys.remove(rank_key("random", self.context.random_rank))
        on_other_stages = self.table.elsewhere
        for name in manifest.tensors:
            if name.startswith(OPTIMIZER):
                is_other = _parameter_of(name) in self.loop.update.elsewhere
            elif name.startswith("modules/") and on_other_stages:
                is_other = name not in live
            else:  # what is kept for each parameter has its name at the end
                is_other = name.rsplit("/", 1)[-1] in on_other_stages
            if is_other:
                keys.add(name)
        return keys

    def _share(self, num_saved: int) -> range:
        return share_of(self.context.data_rank, self.context.num_data_ranks, num_saved)

    def _optimizer_templates(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        saved = {name.removeprefix(OPTIMIZER): record for name, record in manifest.tensors.items() if name.startswith(OPTIMIZER)}
        optimizer, parameters = self.loop.update.optimizer, self.loop.update.parameters
        shapes = {name: record.shape for name, record in saved.items()}
        check_optimizer_state(optimizer, parameters, shapes, unflatten_state({}, manifest.values["optimizer"]["values"]))
        templates = optimizer_templates(optimizer, parameters, {name: record.dtype for name, record in saved.items()})
        return {f"{OPTIMIZER}{name}": tensor for name, tensor in templates.items()}

    def _apply(self, found: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], chosen: Sequence[str], *, everything: bool) -> None:
        loop, progress = self.loop, found["progress"]
        if "model" in chosen:
            self.ties.share_values()
        if "optimizer" in chosen:
            self._restore_optimizer(found["optimizer"], tensors)
        if everything:
            loop.run.step, loop.run.epoch, loop.guard.num_skipped = progress["step"], progress["epoch"], progress["skipped"]
        for name, module in self.table.extra_states().items() if "modules" in chosen else ():
            if name in found["modules"]:
                module.set_extra_state(found["modules"][name])
        if "schedule" in chosen:
            self._restore_schedule(found["schedule"], progress["total_steps"])
        if "data" in chosen:
            loop.stream.load_state_dict(found["data"])
        if "callbacks" in chosen:
            self._restore_callbacks(found["callbacks"])
        if "task" in chosen:
            self.task.load_state_dict(found["task"]["state"])
            self._restore_running([decode_state(tensors[rank_key("task", rank)]) for rank in self._share(progress["num_data_ranks"])])
        if "random" in chosen:
            self._restore_random(progress, tensors)

    def _restore_optimizer(self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        optimizer, parameters = self.loop.update.optimizer, self.loop.update.parameters
        own = {name.removeprefix(OPTIMIZER): tensor for name, tensor in tensors.items() if name.startswith(OPTIMIZER)}
        for remark in load_optimizer_state(optimizer, parameters, own, saved["values"]) + load_group_values(optimizer, saved["groups"]):
            self._remark("%s", remark)

    def _restore_schedule(self, saved: dict[str, Any] | None, total_steps: int | None) -> None:
        loop = self.loop
        if (saved is None) != (loop.lr_scheduler is None):
            here, there = ("a", "none") if saved is None else ("no", "one")
            self._remark("this run has %s LR schedule and the checkpoint has %s; the settings win", here, there)
        elif saved is not None:
            if total_steps != loop.run.total_steps:
                text = "total_steps was %s, is %s now; the LR schedule is that of the new length"
                self._remark(text, total_steps, loop.run.total_steps)
            with shown_once(self.context):
                loop.lr_scheduler.load_state_dict(saved)

    def _restore_running(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        """The metrics and values of the record in progress, from the data ranks for which this one stands."""
        self.loop.records.load_state_dict(of_ranks[0]["records"] if of_ranks else {})
        for name, metric in self.loop.metrics.items():
            remark = load_merged(metric, [state["metrics"][name] for state in of_ranks if name in state["metrics"]])
            if remark is not None:
                self._remark("metric %r: %s", name, remark)

    def _restore_random(self, progress: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> None:
        context = self.context
        then, now = ((each["num_data_ranks"], each["num_random_ranks"]) for each in (progress, self._num_ranks()))
        if then == now:
            self.random.load_state_dict(decode_state(tensors[rank_key("random", context.random_rank)]))
        else:
            self.random.start_anew(progress["step"])
            text = "the checkpoint is of %s, this run has %s: random streams begin anew, from seed, step and rank"
            self._remark(text, *(_ranks_in_words(*each) for each in (then, now)))

    def _num_ranks(self) -> dict[str, int]:
        return {"num_data_ranks": self.context.num_data_ranks, "num_random_ranks": self.context.num_random_ranks}

    def _others(self) -> list[Callback]:
        """The callbacks without the task, which is saved as the task."""
        return [callback for callback in self.callbacks if callback is not self.task]

    def _restore_callbacks(self, saved: Mapping[str, Any]) -> None:
        ours = {callback.state_key: callback for callback in self._others()}
        for key in saved.keys() - ours.keys():
            if saved[key]:
                self._remark("the checkpoint has the state of a callback %r that this run does not have; it is left out", key)
        for key, callback in ours.items():
            if key in saved:
                callback.load_state_dict(saved[key])
            elif callback.state_dict():
                self._remark("the checkpoint has no state for the callback %r; it starts afresh", key)

    def _remark(self, text: str, *arguments: Any) -> None:
        """Say once for all ranks what is not as it was."""
        if self.context.is_main:
            logger.warning(f"resuming: {text}", *arguments)


def _num_saved(manifest: Manifest) -> tuple[int, int]:
    """The data ranks that saved it, and the ranks with random streams of their own. Raises CheckpointError unless each part that they have
    for themselves is there as often."""
    progress = manifest.values.get("progress") if isinstance(manifest.values, dict) else None
    progress = progress if isinstance(progress, dict) else {}
    counts = []
    for part, saved_by in (("task", "num_data_ranks"), ("random", "num_random_ranks")):
        count = sum(name.startswith(rank_key(part, "")) for name in manifest.tensors)
        if count != progress.get(saved_by) or any(key not in manifest.tensors for key in rank_keys(part, count)):
            raise CheckpointError(
                f"the checkpoint has {saved_by}={progress.get(saved_by)} and holds {part!r} of {count}; no run saves such a one: it was "
                "altered, or saved by something else than a Trainer"
            )
        counts.append(count)
    return counts[0], counts[1]


def _ranks_in_words(num_data_ranks: int, num_random_ranks: int) -> str:
    stages = num_random_ranks // num_data_ranks
    return f"{num_data_ranks} data ranks" + (f" with {stages} pipeline ranks each" if stages > 1 else "")


def _parameter_of(key: str) -> str:
    return key.removeprefix(OPTIMIZER).rsplit("/", 1)[0]


def _new_tensor(record: TensorRecord, live: torch.Tensor | None) -> torch.Tensor:
    """Memory for a saved tensor: for this rank's part of it where the live one is distributed, else for all of it."""
    if live is not None and is_distributed(live) and tuple(live.shape) == record.shape:
        return like(live, torch.empty_like(local_of(live), dtype=record.dtype))
    return torch.empty(record.shape, dtype=record.dtype)
