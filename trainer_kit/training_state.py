"""`TrainingState`: everything that a run needs to go on, collected from its owners and given back to them.

Keys are global parameter names, never ranks or stages. Random streams are restored last, because restoring the others may draw.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer_kit.callback import Callback
from trainer_kit.checkpoint.identity import check_identity
from trainer_kit.checkpoint.loader import load
from trainer_kit.checkpoint.manifest import Manifest, read_manifest
from trainer_kit.checkpoint.tree import flatten_state, unflatten_state
from trainer_kit.exceptions import ConfigurationError, nearest
from trainer_kit.loop import TrainingLoop
from trainer_kit.optim.group_values import group_values, load_group_values
from trainer_kit.optim.materialize import materialize_state
from trainer_kit.optim.state import check_optimizer_state, load_optimizer_state, optimizer_tensors, optimizer_values
from trainer_kit.parameters import ParameterTable
from trainer_kit.random_state import RandomStreams
from trainer_kit.task import Task

logger = logging.getLogger("trainer_kit")

PARTS = ("model", "optimizer", "schedule", "data", "random", "callbacks", "task")


@dataclass
class TrainingState:
    """The parts of a run that are saved. `identity` says which run it is; `trainable_only` leaves frozen weights out."""

    loop: TrainingLoop
    table: ParameterTable
    random: RandomStreams
    callbacks: Sequence[Callback]
    task: Task
    identity: dict[str, Any]
    trainable_only: bool = False

    def collect(self) -> tuple[dict[str, torch.Tensor], Any]:
        """Live tensors by key, and JSON-able values; nothing is copied."""
        loop, names = self.loop, self.table.names()
        return flatten_state(
            {
                "progress": {
                    "step": loop.run.step,
                    "epoch": loop.run.epoch,
                    "total_steps": loop.run.total_steps,
                    "skipped": loop.guard.num_skipped,
                },
                "model": self.table.tensors(trainable_only=self.trainable_only),
                "modules": {name: module.get_extra_state() for name, module in self.table.extra_states().items()},
                "optimizer": {
                    "tensors": optimizer_tensors(loop.optimizer, names),
                    "values": optimizer_values(loop.optimizer, names),
                    "groups": group_values(loop.optimizer),
                },
                "schedule": None if loop.lr_scheduler is None else loop.lr_scheduler.state_dict(),
                "data": loop.stream.state_dict(),
                "random": self.random.state_dict(),
                "callbacks": {callback.state_key: callback.state_dict() for callback in self._others()},
                "task": {
                    "state": self.task.state_dict(),
                    "records": loop.records.state_dict(),
                    "metrics": {name: metric.state_dict() for name, metric in loop.metrics.items() if hasattr(metric, "state_dict")},
                },
            }
        )

    def restore(self, path: str, parts: Sequence[str] | None, *, verify: bool = True) -> int:
        """Bring the run to the state in the folder `path`; returns its number of finished steps.

        parts: restore these alone, and leave the step counter; without it everything must fit.
        """
        for part in parts or ():
            if part not in PARTS:
                raise ConfigurationError(f"load_checkpoint(parts=...) has {part!r}; {nearest(part, PARTS)}")
        manifest = read_manifest(path, verify=verify)
        if parts is None:
            for line in check_identity(manifest.identity, self.identity, path):
                logger.warning("resuming with another setting: %s", line)
        chosen = PARTS if parts is None else tuple(parts)
        if "model" in chosen:
            chosen = (*chosen, "modules")
        if "optimizer" in chosen:
            materialize_state(self.loop.optimizer)
            self._check_optimizer(manifest)  # before anything is loaded: a refused resume leaves the model as it was
        templates = self._templates(manifest, chosen)
        values = load(path, templates, prefixes=[f"{part}/" for part in chosen], manifest=manifest, verify=verify)
        found = {part: unflatten_state(templates, values[part]) for part in (*chosen, "progress")}
        self._apply(found, chosen, everything=parts is None)
        return manifest.step

    def check_identity(self, path: str) -> list[str]:
        """Raise CheckpointError if the checkpoint at `path` is of another run; returns a line for each other difference."""
        return check_identity(read_manifest(path).identity, self.identity, path)

    def _check_optimizer(self, manifest: Manifest) -> None:
        prefix = "optimizer/tensors/"
        shapes = {name.removeprefix(prefix): record.shape for name, record in manifest.tensors.items() if name.startswith(prefix)}
        check_optimizer_state(self.loop.optimizer, self.table.names(), shapes, unflatten_state({}, manifest.values["optimizer"]["values"]))

    def _templates(self, manifest: Manifest, chosen: Sequence[str]) -> dict[str, torch.Tensor]:
        """Live tensors to load into where they fit; new ones where only the file knows the shape, or the saved dtype differs."""
        live = self.collect()[0]
        templates = {name: tensor for name, tensor in live.items() if name.startswith("model/") and "model" in chosen}
        for part in chosen:
            for name, tensor in manifest.empty_tensors(f"{part}/").items():
                mine = live.get(name)
                fits = part == "optimizer" and mine is not None and mine.shape == tensor.shape and mine.dtype == tensor.dtype
                if part != "model":
                    templates[name] = mine if fits and mine is not None else tensor
        return templates

    def _apply(self, found: Mapping[str, Any], chosen: Sequence[str], *, everything: bool) -> None:
        loop = self.loop
        if "optimizer" in chosen:
            saved = found["optimizer"]
            names = self.table.names()
            for remark in load_optimizer_state(loop.optimizer, names, saved["tensors"], saved["values"]) + load_group_values(
                loop.optimizer, saved["groups"]
            ):
                logger.warning("resuming: %s", remark)
        if everything:
            progress = found["progress"]
            loop.run.step, loop.run.epoch, loop.guard.num_skipped = progress["step"], progress["epoch"], progress["skipped"]
        for name, module in self.table.extra_states().items() if "modules" in chosen else ():
            if name in found["modules"]:
                module.set_extra_state(found["modules"][name])
        if "schedule" in chosen:
            self._restore_schedule(found["schedule"], found["progress"]["total_steps"])
        if "data" in chosen:
            loop.stream.load_state_dict(found["data"])
        if "callbacks" in chosen:
            self._restore_callbacks(found["callbacks"])
        if "task" in chosen:
            self.task.load_state_dict(found["task"]["state"])
            loop.records.load_state_dict(found["task"]["records"])
            for name, state in found["task"]["metrics"].items():
                if name in loop.metrics and hasattr(loop.metrics[name], "load_state_dict"):
                    loop.metrics[name].load_state_dict(state)
        if "random" in chosen:
            self.random.load_state_dict(found["random"])

    def _restore_schedule(self, saved: dict[str, Any] | None, total_steps: int | None) -> None:
        loop = self.loop
        if (saved is None) != (loop.lr_scheduler is None):
            here, there = ("a", "none") if saved is None else ("no", "one")
            logger.warning("resuming: this run has %s LR schedule and the checkpoint has %s; the settings win", here, there)
        elif saved is not None:
            if total_steps != loop.run.total_steps:
                text = "resuming: total_steps was %s, is %s now; the LR schedule is that of the new length"
                logger.warning(text, total_steps, loop.run.total_steps)
            loop.lr_scheduler.load_state_dict(saved)

    def _others(self) -> list[Callback]:
        """The callbacks without the task, which is saved as the task."""
        return [callback for callback in self.callbacks if callback is not self.task]

    def _restore_callbacks(self, saved: Mapping[str, Any]) -> None:
        ours = {callback.state_key: callback for callback in self._others()}
        for key in saved.keys() - ours.keys():
            if saved[key]:
                logger.warning("resuming: the checkpoint has the state of a callback %r that this run does not have; it is left out", key)
        for key, callback in ours.items():
            if key in saved:
                callback.load_state_dict(saved[key])
            elif callback.state_dict():
                logger.warning("resuming: the checkpoint has no state for the callback %r; it starts afresh", key)
