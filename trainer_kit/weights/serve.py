"""How several ranks write one model state: rank 0 runs the writer, and asks the others for a tensor when its turn comes.

Rank 0 may fail anywhere (a full disk, a folder of someone else), so nobody runs ahead: before each tensor that it does not hold whole it
announces the name, and the others give their parts; at the end it announces the file names, or the error. So no rank waits for one that
has left. Not here: what is written, how the parts come together (`whole.py`), and how tensors of other stages come (`stages.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from trainer_kit.mesh.team import Team, portable

if TYPE_CHECKING:
    import torch

    from trainer_kit.weights.writer import StateItem


def write_together(team: Team, items: Iterable[StateItem], write: Callable[[Iterable[StateItem]], list[str]]) -> list[str]:
    """What `write(items)` gives on rank 0, on all ranks; or its error. All ranks have the same items."""
    if team.is_alone:
        return write(items)
    known = team.everywhere(lambda: list(items))
    return _lead(team, known, write) if team.is_main else _serve(team, known)


def _lead(team: Team, items: Sequence[StateItem], write: Callable[[Iterable[StateItem]], list[str]]) -> list[str]:
    try:
        files = write([item._replace(get=partial(_announced, team, item)) if item.collective else item for item in items])
    except BaseException as error:
        team.broadcast(("failed", portable(error)))
        raise
    team.broadcast(("done", files))
    return files


def _announced(team: Team, item: StateItem) -> torch.Tensor | None:
    team.broadcast(("get", item.name))
    return item.get()


def _serve(team: Team, items: Sequence[StateItem]) -> list[str]:
    by_name = {item.name: item for item in items}
    while True:
        word, content = team.broadcast(None)
        if word == "get":
            by_name[content].get()
        elif word == "done":
            return list(content)
        else:
            content.add_note("on rank 0")
            raise content
