"""What happens around the steps of one fit, whatever ends it: everything opened is closed once, and the first error surfaces unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from trainer_kit import events
from trainer_kit.callback import Dispatcher
from trainer_kit.checkpoint import CheckpointSaver
from trainer_kit.mesh import DistributedContext
from trainer_kit.random_state import RandomStreams
from trainer_kit.run_state import Requests, RunState


@dataclass
class FitLifecycle:
    """Guards one fit.

    last_values: when an error ends the fit, brings out the records that are still on their way, if that takes no other rank. undo_step: called when a step ended
    half-way. closers: called at the end, each once.
    """

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
        self.run.phase, self.run.stop_reason, self.run.stop_raising, self.run.stop_agreed = "between steps", None, None, False
        try:
            self.random.enter()
            yield
        except BaseException as caught:
            error = caught
            self._tell(caught)
            raise
        finally:
            half_way, self.run.phase = self.run.phase == "step", "idle"
            self.random.leave()
            try:
                self._close_all(error, half_way)
            finally:
                error = None  # a frame that holds its own exception would keep the model alive
        if self.run.stop_raising is not None:
            raising, self.run.stop_raising = self.run.stop_raising, None
            raise raising

    def _tell(self, error: BaseException) -> None:
        self.requests.clear()
        try:
            self.last_values()
        except Exception as second:
            error.add_note(f"besides, the last records were not delivered: {type(second).__name__}: {second}")
        tell(self.dispatcher, error)

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


def tell(dispatcher: Dispatcher, error: BaseException) -> None:
    """Send `on_exception`; a handler that fails is noted on the error and does not replace it."""
    try:
        dispatcher.emit(events.RunException, exception=error)
    except Exception as second:
        error.add_note(f"besides, an on_exception handler failed: {type(second).__name__}: {second}")


@contextmanager
def telling(dispatcher: Dispatcher) -> Iterator[None]:
    """The block prepares a run: an error in it is told, and closes the callbacks, which may have opened something."""
    try:
        yield
    except BaseException as error:
        tell(dispatcher, error)
        for callback in dispatcher.callbacks:
            try:
                callback.close()
            except Exception as failure:
                error.add_note(f"besides, closing failed: {type(failure).__name__}: {failure}")
        raise


@contextmanager
def together(what: str, context: DistributedContext, run: RunState) -> Iterator[None]:
    """The block is a call that all ranks make. Another call on another rank is an error at once; an error on one rank ends it on all.

    The way out of an error calls no collective: whoever fails says so, and the others stop waiting for it.
    """
    if context.world_size == 1 or run.together:
        yield
        return
    run.together = True
    try:
        with context.failures.section():
            context.host.agree(what)
            yield
    finally:
        run.together = False
