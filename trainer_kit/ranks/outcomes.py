"""What can come of a function on one rank, and of all ranks together: their results, or one error.

The first error in time is the cause and is told in full. The others are usually its echo: a rank that lost a connection only saw another
one go, and one that hangs waits for it.
"""

from __future__ import annotations

import pickle
import reprlib
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from trainer_kit.exceptions import StateError

_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Connection refused")


@dataclass(frozen=True)
class Returned:
    """The function returned. value: pickled. intact: the default process group is the one it began with."""

    value: bytes
    intact: bool = True


@dataclass(frozen=True)
class Raised:
    """The function raised, at `time` of the machine's monotonic clock. error: pickled, or None if it can't be."""

    summary: str
    text: str
    time: float
    error: bytes | None


@dataclass(frozen=True)
class Died:
    """The process ended; a negative exit code is the signal that killed it."""

    exit_code: int
    time: float


@dataclass(frozen=True)
class Hung:
    """No answer in `seconds` after the start, or after the first error of another rank. stack: where it was, if known."""

    seconds: float
    after_error: bool
    stack: str = ""


Outcome = Returned | Raised | Died | Hung


def raised(error: BaseException) -> Raised:
    """In the rank: its error, with the traceback from the frame below the caller's."""
    now = time.monotonic()
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    if type(error) is AssertionError and not error.args:  # outside of pytest's own process an assert tells no values
        *_, last = traceback.walk_tb(trace)
        text += _locals_of(last[0])
    return Raised(_in_one_line(error), text, now, _pickled(error))


def _in_one_line(error: BaseException) -> str:
    """As the last line of a traceback, without the notes that were added to the error."""
    described = traceback.TracebackException.from_exception(error)
    described.__notes__ = None
    return list(described.format_exception_only())[-1].strip()


def _pickled(error: BaseException) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # of anything the error holds; its text is sent in any case
        return None
    return pickled


def _locals_of(frame: FrameType) -> str:
    short = reprlib.Repr()
    short.maxother = short.maxstring = 300
    lines = []
    for name, value in frame.f_locals.items():
        try:
            lines.append(f"  {name} = {short.repr(value)}\n")
        except Exception as error:  # of the repr of anything
            lines.append(f"  {name}: {type(value).__name__}, whose repr raised {type(error).__name__}\n")
    return "where\n" + "".join(lines) if lines else ""


def results(caller: str, outcomes: Mapping[int, Outcome], printed: Mapping[int, str]) -> list[Any]:
    """The values by rank, or a StateError made of everything that went wrong, with what the ranks printed as far as it is known here."""
    failed = sorted((rank for rank in outcomes if not isinstance(outcomes[rank], Returned)), key=lambda rank: _order(rank, outcomes[rank]))
    if not failed:
        return [pickle.loads(outcomes[rank].value) for rank in sorted(outcomes)]  # type: ignore[union-attr]
    first, others = failed[0], failed[1:]
    parts = [f"{caller}: rank {first} of {len(outcomes)} {_say(outcomes[first], whole=True)}"]
    same = [rank for rank in others if _summary(outcomes[rank]) == _summary(outcomes[first]) is not None]
    parts += [f"so did rank {', '.join(map(str, same))}"] if same else []
    parts += [f"rank {rank} {_say(outcomes[rank], whole=False)}" for rank in others if rank not in same]
    parts += [f"rank {rank} printed:\n{printed[rank].strip()}" for rank in sorted(printed) if printed[rank].strip()]
    raise StateError("\n\n".join(parts)) from _cause(outcomes[first])


def _summary(outcome: Outcome) -> str | None:
    return outcome.summary if isinstance(outcome, Raised) else None


def _cause(outcome: Outcome) -> BaseException | None:
    if not isinstance(outcome, Raised) or outcome.error is None:
        return None
    try:
        return pickle.loads(outcome.error)
    except Exception:  # its class may be known to the rank only; the text says all
        return None


def _order(rank: int, outcome: Outcome) -> tuple[int, float, int]:
    if isinstance(outcome, Raised):
        return int(any(echo in outcome.text for echo in _ECHOES)), outcome.time, rank
    return (0, outcome.time, rank) if isinstance(outcome, Died) else (2, 0.0, rank)


def _say(outcome: Outcome, *, whole: bool) -> str:
    match outcome:
        case Raised():
            return f"raised {outcome.summary}" + (f"\n\n{outcome.text.rstrip()}" if whole else "")
        case Died():
            how = f"was killed by signal {-outcome.exit_code}" if outcome.exit_code < 0 else f"left with exit code {outcome.exit_code}"
            return f"{how} before its function returned"
        case Hung():
            since = "that" if outcome.after_error else "the start"
            stack = f". It was here:\n{outcome.stack.strip()}" if outcome.stack else ""
            return f"had not come back {outcome.seconds:.0f} s after {since} and was killed{stack}"
    raise AssertionError(outcome)
