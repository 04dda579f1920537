"""What happens around the calls of a run, whatever ends them: everything opened is closed once, and the first error surfaces unchanged.

On a mesh the way out of an error calls no collective. Before editing: the other ranks learn of an error before anything else is done about
it, because what callbacks do then, and closing, may take long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_kit import events
from trainer_kit.callback import Dispatcher
from trainer_kit.checkpoint import CheckpointSaver
from trainer_kit.exceptions import StateError
from trainer_kit.mesh import DistributedContext
from trainer_kit.random_state import RandomStreams
from trainer_kit.run_state import Requests, RunState

if TYPE_CHECKING:
    from trainer_kit.assembly import Parts, Recipe


@dataclass
class FitLifecycle:
    """Guards one fit.

    last_values: when an error ends the fit, brings out the records that are still on their way, if that takes no other rank.
    undo_step: called when a step ended half-way. closers: called at the end, each once.
    """

    context: DistributedContext
    run: RunState
    dispatcher: Dispatcher
    requests: Requests
    random: RandomStreams
    saver: CheckpointSaver
    last_values: Callable[[], None]
    undo_step: Callable[[], None]
    closers: Sequence[Callable[[], None]]

    @contextmanager
    def around(self) -> Iterator[None]:
        """The block is the fit. After it, in order or not: streams given back, everything closed, `on_exception` told."""
        error: BaseException | None = None
        run = self.run
        run.phase, run.stop_reason, run.stop_raising, run.stop_agreed, run.raising_agreed = "between steps", None, None, False, False
        try:
            self.random.enter()
            yield
        except BaseException as caught:
            error = caught
            self._tell(caught)
            raise
        finally:
            half_way, run.phase = run.phase == "step", "idle"
            self.random.leave()
            try:
                self._close_all(error, half_way)
            finally:
                error, run.failing = None, False  # a frame that holds its own exception would keep the model alive
        if run.stop_raising is not None:
            raising, run.stop_raising = run.stop_raising, None
            raise raising

    def _tell(self, error: BaseException) -> None:
        self.context.failures.report(error)
        self.run.failing = True
        self.requests.clear()
        try:
            self.last_values()
        except Exception as second:
            error.add_note(f"besides, the last records were not delivered: {type(second).__name__}: {second}")
        _to_callbacks(self.dispatcher, error)

    def _close_all(self, error: BaseException | None, half_way: bool) -> None:
        first: BaseException | None = error
        undo = [self.undo_step] if half_way else []
        for close in (lambda: self.saver.close(error), *undo, *self.closers):
            try:
                close()
            except BaseException as failure:  # Ctrl-C too: the others must still be closed
                if first is None:
                    first = failure
                else:
                    first.add_note(f"besides, closing failed: {type(failure).__name__}: {failure}")
        if error is None and first is not None:
            raise first


def _to_callbacks(dispatcher: Dispatcher, error: BaseException) -> None:
    """Send `on_exception`; a handler that fails is noted on the error and does not replace it."""
    try:
        dispatcher.emit(events.RunException, exception=error)
    except Exception as second:
        error.add_note(f"besides, an on_exception handler failed: {type(second).__name__}: {second}")


def tell(error: BaseException, dispatcher: Dispatcher, run: RunState, report: Callable[[BaseException], None]) -> None:
    """Tell of the error that ends a call: the other ranks by `report`, then the callbacks."""
    report(error)
    before, run.failing = run.failing, True
    try:
        _to_callbacks(dispatcher, error)
    finally:
        run.failing = before


@contextmanager
def telling(dispatcher: Dispatcher, run: RunState, report: Callable[[BaseException], None]) -> Iterator[None]:
    """The block prepares a run: an error in it is told, and closes the callbacks, which may have opened something."""
    try:
        yield
    except BaseException as error:
        tell(error, dispatcher, run, report)
        for callback in dispatcher.callbacks:
            try:
                callback.close()
            except Exception as failure:
                error.add_note(f"besides, closing failed: {type(failure).__name__}: {failure}")
        raise


def close_all(context: DistributedContext | None, recipe: Recipe, parts: Parts | None, saver: CheckpointSaver | None) -> None:
    """Close what a trainer opened so far: each of them whatever another one raises, the last one first."""
    with ExitStack() as closing:
        if context is not None:
            closing.callback(context.close)
        closing.callback(recipe.task.finalize)
        closing.callback(recipe.data.close)
        if parts is not None and parts.training is not None:
            closing.callback(parts.training.loop.stream.close)
            closing.callback(parts.training.loop.gradients.close)
        if saver is not None:
            closing.callback(saver.close)


@contextmanager
def together(what: str, context: DistributedContext, run: RunState, arguments: Mapping[str, object]) -> Iterator[None]:
    """The block is a call that all ranks make, with the same arguments. If not all do, or one fails, it ends on all of them.

    A call inside of another one, as of a callback, is met in the same way, since the other ranks may not come to it.
    """
    if context.world_size == 1:
        yield
        return
    if run.failing:
        raise StateError(
            f"{what} takes all ranks, and this one is ending by an error that others may not have; leave it out of on_exception"
        )
    detail = ", ".join(f"{name}={_text(value)}" for name, value in arguments.items())
    if run.together:
        context.host.agree(what, detail)
        yield
        return
    run.together = True
    try:
        with context.failures.section():
            context.host.agree(what, detail)
            yield
    finally:
        run.together = False


def _text(value: object) -> str:
    """An argument, a path as the same text for each of its types."""
    return repr(os.fspath(value) if isinstance(value, str | os.PathLike) else value)
