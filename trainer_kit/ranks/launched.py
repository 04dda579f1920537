"""The rank's side of `trainer_kit.launch`: one function, its outcome, the end."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from trainer_kit.ranks.calls import Call, find
from trainer_kit.ranks.outcomes import Raised, Returned, raised


@dataclass(frozen=True)
class Start:
    """What a rank needs. call: None if it was forked with the function."""

    call: Call | None
    environment: Mapping[str, str]
    num_threads: int
    arguments_of_script: list[str]


def serve(connection: Connection, forked_with: tuple[Callable[..., Any], tuple[Any, ...]] | None = None) -> None:
    """Run the function and send what came of it. A rank that returned waits until all have: its peers may still talk to it."""
    start: Start = pickle.loads(connection.recv_bytes())
    outcome = _run(start, forked_with)
    connection.send_bytes(pickle.dumps(outcome))
    if isinstance(outcome, Returned):
        try:
            connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            pass  # the parent is gone, and nobody waits for this rank


def _run(start: Start, forked_with: tuple[Callable[..., Any], tuple[Any, ...]] | None) -> Returned | Raised:
    try:
        os.environ.clear()
        os.environ.update(start.environment)
        sys.argv[:] = start.arguments_of_script
        torch.set_num_threads(start.num_threads)
        function, arguments = find(start.call) if start.call is not None else forked_with  # type: ignore[misc]
        value = function(*arguments)
        return Returned(pickle.dumps(value))
    except BaseException as error:  # an exit or an interrupt of this rank ends all of them
        return raised(error)
