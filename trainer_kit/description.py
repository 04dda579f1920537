"""What `trainer.describe()` shows: sections of names and values, as text and as HTML for notebooks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from trainer_kit.mesh.context import DistributedContext
from trainer_kit.torch_private import takes_found_inf

if TYPE_CHECKING:
    from trainer_kit.trainer import Trainer

Rows = Sequence[tuple[str, str]]


def say(text: str, context: DistributedContext) -> None:
    """Tell the user one line, once per run rather than once per rank."""
    if context.is_main:
        print(f"trainer_kit: {text}", flush=True)  # noqa: T201


@contextmanager
def shown_once(context: DistributedContext) -> Iterator[None]:
    """Warnings of the block, which are the same on all ranks, show on rank 0 alone."""
    if context.is_main:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def short_repr(part: Any) -> str:
    """A part of a run in few words: settings objects with what was given, functions by name, others as they show themselves."""
    if isinstance(part, BaseModel):
        given = ", ".join(
            f"{name}={getattr(part, name)!r}" for name in type(part).model_fields if name in part.model_fields_set and name != "name"
        )
        return f"{type(part).__name__}({given})" if type(part).__repr__ is BaseModel.__repr__ else repr(part)
    if type(part).__repr__ is object.__repr__:
        return type(part).__name__
    return getattr(part, "__qualname__", None) or repr(part)


@dataclass(frozen=True)
class Description:
    """Sections of a run. `str()` is a plain text, `short()` a few lines, and notebooks show tables."""

    sections: Mapping[str, Rows]

    def __str__(self) -> str:
        lines = []
        for title, rows in self.sections.items():
            width = max((len(name) for name, _ in rows), default=0)
            lines += [title, *(f"  {name:<{width}}  {value}" for name, value in rows)]
        return "\n".join(lines)

    __repr__ = __str__

    def short(self) -> str:
        """The main facts, in a few lines; about the mesh only if there is one."""
        titles = ["model", "batch", "run"] + (["mesh"] if len(self.sections["mesh"]) > 1 else [])
        return "\n".join(f"{title}: " + ", ".join(f"{name} {value}" for name, value in self.sections[title]) for title in titles)

    def _repr_html_(self) -> str:
        import html

        parts = []
        for title, rows in self.sections.items():
            body = "".join(
                f"<tr><td style='text-align:left'>{html.escape(name)}</td><td style='text-align:left'>{html.escape(value)}</td></tr>"
                for name, value in rows
            )
            parts.append(f"<details open><summary><b>{html.escape(title)}</b></summary><table>{body}</table></details>")
        return "<div>" + "".join(parts) + "</div>"


def describe(trainer: Trainer) -> Description:
    """The description of a trainer; builds it if that is still to be done."""
    trainer.build()
    return Description(
        {"model": _model(trainer), "batch": _batch(trainer), "run": _run(trainer), "mesh": _mesh(trainer), "events": _events(trainer)}
    )


def _model(trainer: Trainer) -> Rows:
    total, trainable = trainer.parameters.counts()
    rows = [("class", type(trainer.stages[0]).__name__), ("parameters", f"{total:,}")]
    if trainable != total:
        rows.append(("trainable", f"{trainable:,}"))
    held = sum(row.local.numel() for row in trainer.parameters)
    if held != total:
        rows.append(("on this rank", f"{held:,}"))
    if tied := _tied(trainer):
        rows.append(("tied", ", ".join(tied)))
    return [*rows, ("precision", trainer.config.precision)]


def _tied(trainer: Trainer) -> list[str]:
    between = {entry.name: entry.stages for entry in trainer.parameters.entries if len(entry.stages) > 1}
    inside = [f"{alias} = {name}" for alias, name in trainer.parameters.aliases.items() if name not in between]
    return inside + [f"{name} in the stages {' and '.join(map(str, stages))}" for name, stages in between.items()]


def _batch(trainer: Trainer) -> Rows:
    rows = [(name.replace("_", " "), _shown(value)) for name, value in trainer.data.describe().items() if value is not None]
    ranks = trainer.context.num_data_ranks  # accumulation times microbatch size, on each of them
    return [*rows, ("data ranks", _shown(ranks))] if ranks > 1 else rows


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _run(trainer: Trainer) -> Rows:
    steps = "until the data or the time ends" if trainer.total_steps is None else f"{trainer.total_steps:,}"
    rows = [("name", trainer.config.run_name), ("steps", steps), ("finished", f"{trainer.step:,}"), ("task", type(trainer.task).__name__)]
    if trainer.parameters.has_trainable:
        recipe = trainer.recipe
        default = " (default)" if recipe.optimizer is None else ""
        rows.append(("optimizer", short_repr(recipe.optimizer_provider()) + default))
        rows.append(("LR schedule", "none" if recipe.lr_scheduler is None else short_repr(recipe.lr_scheduler)))
    if trainer.parameters.has_trainable and trainer.context.device.type != "cpu":
        fused = takes_found_inf(trainer.optimizer)
        if trainer.config.nonfinite == "skip":
            rows.append(("waits for the device", "once per step, because the LR schedule counts updates that were not skipped"))
        elif not fused:
            rows.append(
                ("waits for the device", "once per step where the task gives its weight as a device tensor: the optimizer is not fused")
            )
    return rows


def _mesh(trainer: Trainer) -> Rows:
    context = trainer.context
    rows = [("ranks", context.describe())]
    if context.num_pipeline_ranks > 1:
        rows.append(("pipeline", f"{context.strategy.schedule} over {context.stage_layout.num_stages} stages"))
    if context.world_size > 1:
        places = [f"{dim} {place}" for dim, place in context.coordinates().items()]
        rows.append(("this rank", ", ".join([str(context.rank), *places])))
    if context.num_pipeline_ranks > 1:
        rows.append(("its stages", ", ".join(map(str, context.stages))))
    return rows


def _events(trainer: Trainer) -> Rows:
    rows = [(callback.state_key, callback.describe()) for callback in trainer.callbacks]
    return rows + [(method, ", ".join(names)) for method, names in trainer.listeners().items()]
