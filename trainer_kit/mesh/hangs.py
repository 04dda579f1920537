"""What to say about a collective that did not end in time, and where this process was.

gloo raises a RuntimeError without a type of its own, so it is known by its words. NCCL ends the process itself.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from types import TracebackType

from torch import nn

from trainer_kit.torch_private import fsdp_unit_name

_TIMED_OUT = ("Timed out waiting", "Application timeout caused pair closure", "wait timeout after")
_CLOSED = ("Connection closed by peer", "Connection reset by peer")
_STACK_LINES = 12


def is_hang(text: str) -> bool:
    """Whether the text of an error is that of a collective that took too long."""
    return any(words in text for words in _TIMED_OUT)


def explain_hang(error: BaseException) -> None:
    """Add to an error of a collective which one it was, as far as it shows, and what usually leads to it."""
    if not isinstance(error, RuntimeError):
        return
    where = _module_at(error.__traceback__)
    place = f" in the module {where}" if where else ""
    if is_hang(str(error)):
        error.add_note(
            f"a collective{place} had no answer from other ranks{_in_time(str(error))}. Usual causes: a module under FSDP or tensor "
            "parallelism that is called on some ranks only; a call that all ranks must make, under a condition such as `if rank == 0`; "
            "a rank that is slower than that, then raise step_timeout (setup_timeout for saves and exports)"
        )
    elif any(words in str(error) for words in _CLOSED):
        error.add_note(f"another rank ended, or gave up waiting, during a collective{place}; see its output for the reason")


def _in_time(text: str) -> str:
    found = re.search(r"(\d+)ms", text)
    return f" within {int(found[1]) / 1000:g} s" if found else " in time"


def _module_at(trace: TracebackType | None) -> str | None:
    """The name of the innermost module that was being called or run backward, from the outermost one on."""
    outermost: nn.Module | None = None
    found: str | None = None
    for frame, _ in traceback.walk_tb(trace):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            outermost = owner if outermost is None else outermost
            name = next((name for name, module in outermost.named_modules() if module is owner), "")
            found = f"{name!r} ({type(owner).__name__})" if name else type(owner).__name__
        elif (unit := fsdp_unit_name(owner)) is not None:
            found = repr(unit)
    return found


def main_thread_stack() -> str:
    """Where the main thread of this process is, its innermost calls."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-_STACK_LINES:]).rstrip()
