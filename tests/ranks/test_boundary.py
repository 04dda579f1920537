"""The boundary between two steps: what one rank wants counts for all, and what concerns all must be asked for by all."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.ranks.support import MESHES, MeanOutput, Parts, Weight, delay_saves, on_mesh, t
from trainer_kit import Callback
from trainer_kit.callbacks import Checkpoint, Evaluate, Signals
from trainer_kit.exceptions import StateError
from trainer_kit.testing import run_on_ranks


def data(num_packs: int = 6, num_microbatches: int = 1) -> Parts:
    return Parts(*([[t(1)] * num_microbatches] * num_packs for _ in range(2)))


class StopsAt(Callback):
    """Stops on one rank in one event, the first time that the trainer has made two steps; writes down how the run ended."""

    def __init__(self, rank: int, event: str) -> None:
        self.rank, self.event, self.ends, self.done = rank, event, [], False

    def _act(self, event, name):
        trainer = event.trainer
        if name == self.event and trainer.context.rank == self.rank and trainer.step >= 2 and not self.done:
            self.done = True
            trainer.stop(f"asked for in {name}")

    def on_microbatch_end(self, event):
        if event.microbatch == 1:
            self._act(event, "microbatch_end")

    def on_step_end(self, event):
        self._act(event, "step_end")

    def on_metrics(self, event):
        self._act(event, "metrics")

    def on_evaluate_end(self, event):
        self._act(event, "evaluate_end")

    def on_checkpoint_saved(self, event):
        self._act(event, "checkpoint_saved")

    def on_epoch_end(self, event):
        self._act(event, "epoch_end")

    def on_fit_end(self, event):
        self.ends.append((event.trainer.step, event.reason, event.interrupted))


EXPECTED = {"microbatch_end": 3, "step_end": 2, "metrics": 2, "evaluate_end": 2, "checkpoint_saved": 2, "epoch_end": 2}


def job_stop(name, folder):
    found = {}
    for event, rank in zip(EXPECTED, (0, 1, 1, 0, 1, 1), strict=True):
        stops = StopsAt(rank, event)
        callbacks = [stops, Evaluate(data(1), every=2, at_end=False), Checkpoint(f"{folder}/{event}", every=2, asynchronous=False)]
        trainer = on_mesh(
            Weight(), MeanOutput(), data(2, 4), MESHES[name], callbacks=callbacks, total_steps=6, log_delay=0, optimizer=None
        )
        trainer.fit()
        found[event] = (trainer.step, stops.ends)
        trainer.close()
    return found


@pytest.mark.parametrize("name", ["replicate", "fsdp"])
def test_a_stop_on_one_rank_ends_the_run_on_all_after_the_same_step(name, tmp_path):
    """B81: asked for in the second microbatch of four, the pack is finished; with the normal end events, and the same reason everywhere."""
    expected = {event: (step, [(step, f"asked for in {event}", False)]) for event, step in EXPECTED.items()}
    assert run_on_ranks(2, job_stop, name, str(tmp_path)) == [expected, expected]
    for event, step in EXPECTED.items():
        assert sorted(path.name for path in (tmp_path / event).glob("step-*"))[-1] == f"step-{step:08}"


class Acts(Callback):
    """Does something on one rank in a step."""

    def __init__(self, rank: int, step: int, act) -> None:
        self.rank, self.step, self.act, self.ends = rank, step, act, []

    def on_step_start(self, event):
        if event.trainer.context.rank == self.rank and event.step == self.step:
            self.act(event.trainer)

    def on_fit_end(self, event):
        self.ends.append((event.trainer.step, event.reason, event.interrupted))


def out_of_time(trainer):
    trainer._run.deadline = time.monotonic() - 1.0


def terminate(trainer):
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt(trainer):
    os.kill(os.getpid(), signal.SIGINT)


def stop_and_raise(trainer):
    trainer.stop("found it", raising=LookupError("the needle"))


def job_end(folder, what):
    acts = Acts(1, 2, {"time": out_of_time, "SIGTERM": terminate, "SIGINT": interrupt, "raising": stop_and_raise}[what])
    saves = Checkpoint(folder, every=100, asynchronous=False)
    settings = {"max_time": 600.0} if what == "time" else {}
    trainer = on_mesh(Weight(), MeanOutput(), data(), MESHES["replicate"], callbacks=[acts, saves, Signals(True)], **settings)
    error = None
    try:
        trainer.fit()
    except BaseException as caught:
        error = (type(caught).__name__, str(caught), getattr(caught, "code", None))
    again = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ends = list(acts.ends)
    trainer.fit(4)  # the trainer stays usable, and no rank thinks that the other one failed
    step = trainer.step
    trainer.close()
    return ends, error, again, step


ENDS = {
    "time": ("max_time is over", [None, None]),
    "SIGTERM": ("SIGTERM", [("Interrupted", 143)] * 2),
    "SIGINT": ("interrupted", [("KeyboardInterrupt", None)] * 2),
    "raising": ("found it", [("StateError", None), ("LookupError", None)]),
}


@pytest.mark.parametrize("what", ENDS)
def test_the_end_comes_to_all_ranks_alike(what, tmp_path):
    """Design decision 7: a clock, a SIGTERM or a Ctrl-C that only rank 1 saw. All stop after step 3, save, and raise the same."""
    reason, errors = ENDS[what]
    for rank, (ends, error, again, step) in enumerate(run_on_ranks(2, job_end, str(tmp_path), what)):
        assert ends == [(3, reason, what not in ("time",))]
        assert (None if error is None else (error[0], error[2])) == errors[rank]
        assert again and step == 4
        if what == "raising" and rank == 0:
            assert "LookupError: the needle" in error[1]
    assert (tmp_path / "step-00000003").is_dir()


class Asks(Callback):
    """Asks on rank 0 for something that concerns all ranks."""

    def __init__(self, ask) -> None:
        self.ask = ask

    def on_step_end(self, event):
        self.ask(event.trainer)


def job_asks(folder):
    found = []
    for ask in (
        lambda trainer: trainer.context.is_main and trainer.save_checkpoint(f"{folder}/a"),
        lambda trainer: trainer.context.is_main and trainer.request("evaluate", data=[]),
        lambda trainer: trainer.request("save", path=f"{folder}/{trainer.context.rank}"),
    ):
        trainer = on_mesh(Weight(), MeanOutput(), data(), MESHES["replicate"], callbacks=[Asks(ask)])
        with pytest.raises(StateError) as caught:
            trainer.fit()
        found.append((str(caught.value), trainer.step))
        trainer.close()
    return found


def test_a_request_of_one_rank_is_an_error_on_all(tmp_path):
    """B138: at the next boundary, with who asked for what; nothing is written."""
    first, second = run_on_ranks(2, job_asks, str(tmp_path))
    assert first == second and [step for _, step in first] == [1, 1, 1]
    texts = [text for text, _ in first]
    assert f"rank 0: save(path='{tmp_path}/a', asynchronous=False), rank 1: nothing" in texts[0]
    assert "rank 0: evaluate(data=list), rank 1: nothing" in texts[1]
    assert f"rank 0: save(path='{tmp_path}/0'), rank 1: save(path='{tmp_path}/1')" in texts[2]
    assert list(tmp_path.iterdir()) == []


class Reports(Callback):
    """Each rank reports its own value of a step."""

    def on_step_start(self, event):
        values = ([0.1, 0.9], [0.9, 0.3], [0.2, 0.2])[event.step]
        event.trainer.log("val", values[event.trainer.context.rank])


def job_best(folder):
    best = Checkpoint(folder, every=1, keep_last=1, best=("val", "min", 1), asynchronous=False)
    trainer = on_mesh(Weight(), MeanOutput(), data(3), MESHES["replicate"], callbacks=[Reports(), best], log_delay=0)
    trainer.fit()
    steps, values = best.best_steps(), [round(value, 6) for _, value in trainer.history.values("val")]
    trainer.close()
    return steps, values, sorted(path.name for path in Path(folder).iterdir())


def test_ranks_that_report_different_values_keep_the_same_checkpoint(tmp_path):
    """B44: 0.1 and 0.9 are 0.5 of the run, 0.9 and 0.3 are 0.6, then 0.2. Each rank alone would have kept another one."""
    expected = ([3], [0.5, 0.6, 0.2], ["step-00000003"])
    assert run_on_ranks(2, job_best, str(tmp_path)) == [expected, expected]


class Slow(Callback):
    """Saves in the background after step 1, which takes rank 1 until step 4; writes down from which step on the save counts."""

    def __init__(self, folder: str) -> None:
        self.folder, self.saved = folder, []

    def on_build_end(self, event):
        trainer = event.trainer

        def wait():
            while trainer.context.rank == 1 and trainer.step < 4:
                time.sleep(0.002)

        delay_saves(trainer, wait)

    def on_step_end(self, event):
        if event.trainer.step == 1:
            event.trainer.request("save", path=f"{self.folder}/step-00000001", asynchronous=True)
        elif event.trainer.step > 4 and not self.saved:
            time.sleep(0.01)

    def on_checkpoint_saved(self, event):
        self.saved.append((event.step, event.trainer.step))


def job_background(folder):
    slow = Slow(folder)
    trainer = on_mesh(Weight(), MeanOutput(), data(200), MESHES["replicate"], callbacks=[slow])
    trainer.fit()
    trainer.close()
    return slow.saved


def test_a_background_save_counts_from_the_same_boundary_on_all_ranks(tmp_path):
    """Contract 30 on ranks: whichever rank was ready first waits, without waiting."""
    first, second = run_on_ranks(2, job_background, str(tmp_path))
    assert first == second
    ((step, counted_from),) = first
    assert step == 1 and 4 <= counted_from < 200
