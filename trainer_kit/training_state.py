"""`TrainingState`: everything that a run needs to go on, collected from its owners and given back to them.

Keys are global parameter names, never ranks or stages, so that any mesh can go on. What each data rank, and in a pipeline each of its
ranks, has for itself (random streams, metrics and values of the running record) has a key of its own (`checkpoint/per_rank.py`); the other
plain values are those of rank 0. What users keep is that of the last stage, where losses are computed, and of the other stages what that
one does not have. Random streams are restored last, because restoring the others may draw.

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
from trainer_kit.checkpoint.per_rank import RankCounts, decode_state, encode_state, rank_key, saved_counts
from trainer_kit.checkpoint.tree import flatten_state, merge_values, unflatten_state
from trainer_kit.description import shown_once
from trainer_kit.exceptions import ConfigurationError, nearest
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
OF_USERS = ("modules", "callbacks", "task")  # in which each pipeline stage can have entries of its own
OPTIMIZER = "optimizer/tensors/"
OF_TASK = "task/state"
SAME_ON_RANKS = ("modules/", "callbacks/", OF_TASK)  # what users keep; one rank's is taken for all


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
            tensors, content = self._of_all_stages(tensors, content)
        check_equal_on_ranks({name: tensor for name, tensor in tensors.items() if name.startswith(SAME_ON_RANKS)}, self.context)
        return tensors, content

    def _of_all_stages(self, tensors: dict[str, torch.Tensor], content: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
        """The values of all stages; the tensors of the task, which computes on the last stage, as that one has them if it does."""
        context = self.context
        mine = {part: content[part] for part in OF_USERS}, [name for name in tensors if name.startswith(OF_TASK)]
        of_ranks = context.host.exchange(mine if context.rank == context.first_rank_of_stage else None)
        of_stages = [found for found in of_ranks if found is not None]
        last = of_stages.pop(context.stage_layout.ranks[-1])
        merged = merge_values([values for values, _ in (last, *of_stages)])
        left_out = () if context.hosts_last_stage else last[1]
        return {name: tensor for name, tensor in tensors.items() if name not in left_out}, content | merged

    def _collect(self, of_optimizer: dict[str, Any], of_data: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
        self.table.check_settled()
        loop, run = self.loop, self.loop.run
        tensors, values = flatten_state(
            {
                "progress": {
                    "step": run.step,
                    "epoch": run.epoch,
                    "total_steps": run.total_steps,
                    "skipped": loop.guard.num_skipped,
                    **RankCounts.of(self.context).values(),
                },
                "modules": {name: module.get_extra_state() for name, module in self.table.extra_states()},
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
        """What this rank has for itself, and its tensor peers have too."""
        if self.context.tensor_rank > 0:
            return {}
        of_last = self.loop.metrics.items() if self.context.hosts_last_stage else ()
        metrics = {name: metric.state_dict() for name, metric in of_last if hasattr(metric, "state_dict")}
        states = {"random": self.random.state_dict(), "task": {"metrics": metrics, "records": self.loop.records.state_dict()}}
        return {rank_key(part, self.context.random_rank): encode_state(state) for part, state in states.items()}

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
        if "model" in chosen:
            self.ties.share_values()
        Team.of(self.context).everywhere(lambda: self._apply(found, templates, chosen, everything=parts is None))
        return manifest.step

    def check_identity(self, path: str) -> list[str]:
        """Raise CheckpointError if the checkpoint at `path` is of another run; returns a line for each other difference."""
        return check_identity(read_manifest(path).identity, self.identity, path)

    def _templates(self, manifest: Manifest, chosen: Sequence[str]) -> tuple[dict[str, torch.Tensor], Manifest, set[str]]:
        """Tensors to load into, the checkpoint as far as it concerns this rank, and the keys of the rest."""
        live, others = self.collect()[0], self._of_others(manifest)
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

    def _of_others(self, manifest: Manifest) -> set[str]:
        """The keys that do not concern this rank: of other ranks, of parameters that are updated on these, and of other stages."""
        saved = saved_counts(manifest)
        mine = set(self._own_keys("task", saved))
        if saved == RankCounts.of(self.context):
            mine.update(self._own_keys("random", saved))
        keys = {*saved.keys("task"), *saved.keys("random")} - mine
        modules, on_other_stages = {name for name, _ in self.table.extra_states()}, self.table.elsewhere
        for name in manifest.tensors:
            if name.startswith(OPTIMIZER):
                is_other = _parameter_of(name) in self.loop.update.elsewhere
            elif name.startswith("modules/"):
                is_other = name.split("/")[1] not in modules
            else:  # what is kept for each parameter has its name at the end
                is_other = name.rsplit("/", 1)[-1] in on_other_stages
            if is_other:
                keys.add(name)
        return keys

    def _own_keys(self, part: str, saved: RankCounts) -> list[str]:
        """Of those that so many ranks saved for a part."""
        now = RankCounts.of(self.context)
        return [rank_key(part, rank) for rank in now.share(saved, self.context.random_rank)]

    def _optimizer_templates(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        saved = {name.removeprefix(OPTIMIZER): record for name, record in manifest.tensors.items() if name.startswith(OPTIMIZER)}
        optimizer, parameters = self.loop.update.optimizer, self.loop.update.parameters
        shapes = {name: record.shape for name, record in saved.items()}
        check_optimizer_state(optimizer, parameters, shapes, unflatten_state({}, manifest.values["optimizer"]["values"]))
        templates = optimizer_templates(optimizer, parameters, {name: record.dtype for name, record in saved.items()})
        return {f"{OPTIMIZER}{name}": tensor for name, tensor in templates.items()}

    def _apply(self, found: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], chosen: Sequence[str], *, everything: bool) -> None:
        loop, progress = self.loop, found["progress"]
        if "optimizer" in chosen:
            self._restore_optimizer(found["optimizer"], tensors)
        if everything:
            loop.run.step, loop.run.epoch, loop.guard.num_skipped = progress["step"], progress["epoch"], progress["skipped"]
        for name, module in self.table.extra_states() if "modules" in chosen else ():
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
            self._restore_running([decode_state(tensors[key]) for key in self._own_keys("task", RankCounts.from_values(progress))])
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
        """The metrics and values of the record in progress, from the ranks for which this one stands."""
        of_first = [state["records"] for state in reversed(of_ranks)]  # what several have is that of the first
        parts = ("values", "reductions")
        self.loop.records.load_state_dict({part: dict(item for state in of_first for item in state[part].items()) for part in parts})
        for name, metric in self.loop.metrics.items():
            remark = load_merged(metric, [state["metrics"][name] for state in of_ranks if name in state["metrics"]])
            if remark is not None:
                self._remark("metric %r: %s", name, remark)

    def _restore_random(self, progress: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> None:
        then, now = RankCounts.from_values(progress), RankCounts.of(self.context)
        if then == now:
            self.random.load_state_dict(decode_state(tensors[rank_key("random", self.context.random_rank)]))
        else:
            self.random.start_anew(progress["step"])
            self._remark("the checkpoint is of %s, this run has %s: random streams begin anew, from seed, step and rank", then, now)

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


def _parameter_of(key: str) -> str:
    return key.removeprefix(OPTIMIZER).rsplit("/", 1)[0]


def _new_tensor(record: TensorRecord, live: torch.Tensor | None) -> torch.Tensor:
    """Memory for a saved tensor: for this rank's part of it where the live one is distributed, else for all of it."""
    if live is not None and is_distributed(live) and tuple(live.shape) == record.shape:
        return like(live, torch.empty_like(local_of(live), dtype=record.dtype))
    return torch.empty(record.shape, dtype=record.dtype)
