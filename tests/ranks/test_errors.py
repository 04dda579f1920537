"""An error on one rank ends all ranks with that error in sight; an error that all ranks have leaves a process that goes on."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.ranks.support import MESHES, MeanOutput, Parts, Weight, delay_saves, on_mesh, t
from trainer_kit import AutoDataProvider, Callback, ForwardInputs, Task
from trainer_kit.callbacks import Signals
from trainer_kit.exceptions import StateError
from trainer_kit.optim import AdamW
from trainer_kit.testing import run_on_ranks


class Quick(Callback):
    """Lets a rank that waits for a dead one leave after half a second in place of four, and writes down how this one ends.

    What rank 1 does after its error takes until rank 0 has left, which therefore knows of it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def _note(self, name: str, text: str = "") -> None:
        Path(self.folder, f"{name}-{self.rank}").write_text(text)

    def on_build_start(self, event):
        failures, self.rank = event.trainer.context.failures, event.trainer.context.rank
        failures._grace, leave = 0.5, failures._leave
        failures._leave = lambda why: (self._note("leaves"), leave(why))

    def on_exception(self, event):
        self._note("told", f"{type(event.exception).__name__}: {event.exception}")
        end = time.monotonic() + 10.0
        while self.rank == 1 and not Path(self.folder, "leaves-0").exists() and time.monotonic() < end:
            time.sleep(0.02)
        try:
            event.trainer.save_checkpoint(f"{self.folder}/late")  # would wait for the others
        except StateError as refused:
            self._note("refused", str(refused))

    def close(self):
        self._note("closed")


def fail(trainer, place):
    if trainer.context.rank == 1 and trainer.step == 1:
        raise ValueError(f"bad sample 17 in the {place}")


class FailingCallback(Callback):
    def on_step_start(self, event):
        fail(event.trainer, "callback")


class FailingTask(MeanOutput):
    def compute_loss(self, pipeline_results, state):
        fail(self.trainer, "task")
        return super().compute_loss(pipeline_results, state)


class FailingWeight(Weight):
    def forward(self, c):
        fail(self.trainer, "model")
        return super().forward(c)


class FailingData(torch.utils.data.Dataset):
    """Samples of data rank 1 are broken from the second step on."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index in (6, 7):
            raise ValueError("bad sample 17 in the data")
        return torch.ones(1)


def job_fail(folder, place, mesh):
    model, task, data, callbacks = Weight(), MeanOutput(), Parts(*([[t(1)]] * 4 for _ in range(2))), [Quick(folder)]
    if place == "callback":
        callbacks.append(FailingCallback())
    elif place == "task":
        task = FailingTask()
    elif place == "model":
        model = FailingWeight()
    else:
        data = AutoDataProvider(FailingData(), global_batch_size=4)
    trainer = on_mesh(model, task, data, MESHES[mesh], callbacks=callbacks)
    task.trainer = model.trainer = trainer
    trainer.fit()


@pytest.mark.parametrize(("place", "mesh"), [("callback", "fsdp"), ("task", "replicate"), ("model", "fsdp"), ("data", "replicate")])
def test_an_error_on_one_rank_ends_the_other(place, mesh, tmp_path):
    """Contract 41 and B135: rank 0 is in a collective that nobody finishes; it says what happened on rank 1 and leaves."""
    with pytest.raises(StateError) as caught:
        run_on_ranks(2, job_fail, str(tmp_path), place, mesh, timeout=20.0)
    text, error = str(caught.value), f"ValueError: bad sample 17 in the {place}"
    assert type(caught.value.__cause__) is ValueError or error in text
    assert text.index(f"rank 1 failed: {error}") < text.index("rank 0 ends")
    assert (tmp_path / "told-1").read_text() == error and (tmp_path / "closed-1").exists()
    assert "ending by an error" in (tmp_path / "refused-1").read_text()
    assert (tmp_path / "leaves-0").exists() and not (tmp_path / "told-0").exists()
    assert (tmp_path / "leaves-0").stat().st_mtime <= (tmp_path / "closed-1").stat().st_mtime


class Saves(Callback):
    """A background save is under way when rank 1 fails, and rank 0 keeps it waiting for ever."""

    def on_build_end(self, event):
        seconds = 60.0 if event.trainer.context.rank == 0 else 0.0
        delay_saves(event.trainer, lambda: time.sleep(seconds))

    def on_step_start(self, event):
        if event.step == 1 and event.trainer.context.rank == 1:
            raise ValueError("bad sample 17")

    def on_step_end(self, event):
        event.trainer.request("save", path=f"{self.folder}/step-00000001", asynchronous=True)


def job_fail_during_save(folder):
    saves, quick = Saves(), Quick(folder)
    saves.folder = folder
    trainer = on_mesh(Weight(), MeanOutput(), Parts(*([[t(1)]] * 4 for _ in range(2))), MESHES["fsdp"], callbacks=[quick, saves])
    trainer.fit()


def test_an_error_does_not_wait_for_a_background_save_of_dead_peers(tmp_path):
    """Contract 41: rank 1 closes its saver, whose thread waits for rank 0, which has left. The first error stays the first."""
    with pytest.raises(StateError, match="rank 1 failed: ValueError: bad sample 17"):
        run_on_ranks(2, job_fail_during_save, str(tmp_path), timeout=20.0)
    assert (tmp_path / "closed-1").exists() and not list(tmp_path.glob("step-*/manifest.json"))


class Blocks(Callback):
    """Rank 1 stays away from the boundary, and has rank 0, which waits there, terminated."""

    def on_build_end(self, event):
        self.pids = event.trainer.context.host.exchange(os.getpid())

    def on_step_end(self, event):
        if event.trainer.context.rank == 1:
            time.sleep(0.3)
            os.kill(self.pids[0], signal.SIGTERM)
            time.sleep(2.0)


def job_blocked():
    data = Parts(*([[t(1)]] * 4 for _ in range(2)))
    on_mesh(Weight(), MeanOutput(), data, MESHES["replicate"], callbacks=[Blocks(), Signals(True, grace=0.5)]).fit()


def test_a_rank_in_a_collective_ends_by_sigterm():
    """B140: its signal handler cannot run, but the watch of the grace time does; the default is less than 15 s."""
    assert Signals().grace < 15.0
    with pytest.raises(StateError, match=r"rank 0.*143"):
        run_on_ranks(2, job_blocked, timeout=15.0)


def job_alone(folder, what):
    """Rank 0 makes a call that takes all ranks; rank 1 goes on with its run."""

    class Alone(Callback):
        def on_epoch_end(self, event):
            if event.trainer.context.rank == 0:
                call = {"save": lambda: event.trainer.save_checkpoint(f"{folder}/a"), "evaluate": lambda: event.trainer.evaluate([t(1)])}
                call[what]()

    trainer = on_mesh(Weight(), MeanOutput(), Parts(*([[t(1)]] for _ in range(2))), MESHES["replicate"], callbacks=[Alone(), Quick(folder)])
    trainer.context.host.agree_timeout = 0.5
    trainer.fit()


@pytest.mark.parametrize("what", ["save", "evaluate"])
def test_a_call_of_one_rank_alone_fails_fast(what, tmp_path):
    """B138: also inside of a fit, where the other rank is in a collective of another kind."""
    with pytest.raises(StateError, match=rf"rank 1 did not come to {what}\w*\(\) within 0.5 s; it is collective"):
        run_on_ranks(2, job_alone, str(tmp_path), what, timeout=15.0)
    assert not (tmp_path / "a").exists()


def job_elsewhere(folder):
    """Outside of a fit the ranks are in different calls; afterwards they are in one again."""
    trainer = on_mesh(Weight(), MeanOutput(), Parts([[t(1)]], [[t(3)]]), MESHES["fsdp"], total_steps=2)
    trainer.fit(1)
    found = []
    for call in (
        lambda: trainer.save_checkpoint(f"{folder}/a"),
        lambda: trainer.export(f"{folder}/b"),
        lambda: trainer.predict(trainer.data),
        lambda: trainer.request("save", path=f"{folder}/c"),
    ):
        with pytest.raises(StateError) as caught:
            call() if trainer.context.is_main else trainer.evaluate(trainer.data)
        found.append(str(caught.value))
    with pytest.raises(StateError) as caught:
        trainer.save_checkpoint(f"{folder}/{trainer.context.rank}")
    found.append(str(caught.value))
    values = trainer.evaluate(trainer.data)
    trainer.fit(2)
    step = trainer.step
    trainer.close()
    return found, values, step


def test_ranks_in_different_calls_are_told_so_at_once(tmp_path):
    """B138 and contract 41: each of them is collective; the trainer goes on afterwards."""
    for found, values, step in run_on_ranks(2, job_elsewhere, str(tmp_path)):
        for text, name in zip(found, ("save_checkpoint()", "export()", "predict()", "request('save')"), strict=False):
            assert f"{name} was called on rank 0, while rank 1 is in evaluate()" in text
        assert f"save_checkpoint() was called with path='{tmp_path}/0' on rank 0, but with path='{tmp_path}/1' on rank 1" in found[4]
        assert values["val/mean"] == 2.0 and step == 2
    assert list(tmp_path.iterdir()) == []


# ---- with processes of their own


def start_torchrun(mesh: str, rank: int, folder: Path) -> subprocess.Popen[str]:
    script = Path(__file__).parent / "failing_fit.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), mesh, str(rank)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    return subprocess.Popen([*command, str(folder)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_torchrun_ends_with_the_error_in_sight(tmp_path):
    """B135 and contract 41: with an exit code, long before a timeout, and with the error before everything that follows from it.

    Two runs side by side, which also find no port of each other (B136).
    """
    cases = [("fsdp", 1, tmp_path / "a"), ("replicate", 0, tmp_path / "b")]
    for _, _, folder in cases:
        folder.mkdir()
    running = [start_torchrun(*case) for case in cases]
    printed = [process.communicate(timeout=100)[1] for process in running]
    for process, text, (_, rank, folder) in zip(running, printed, cases, strict=True):
        assert process.returncode != 0, text
        assert f"rank {rank} failed: ValueError: bad sample 17" in text
        first = text.index("Traceback")
        assert "ValueError: bad sample 17" in text[first : first + 4000]
        assert (folder / f"told-{rank}").exists() and (folder / f"closed-{rank}").exists()


# ---- errors that all ranks have


class Blocky(nn.Module):
    """Two blocks, which are FSDP units, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), Breaks()) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def tensor_plan(self, num_ranks: int) -> dict[str, str]:
        return {}


class Breaks(nn.Module):
    """Fails in the forward or backward of the second step, once."""

    place = ""  # what is to fail next

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.breaks("forward")
        if x.requires_grad:
            x.register_hook(lambda gradient: self.breaks("backward"))
        return torch.tanh(x)

    @classmethod
    def breaks(cls, place: str) -> None:
        if cls.place == place:
            cls.place = ""
            raise ValueError(f"broken in {place}")


class Regression(Task):
    def build_forward_inputs(self, batch):
        return ForwardInputs(inputs=batch[0], state=batch[1], weight=len(batch[1]))

    def compute_loss(self, pipeline_results, state):
        Breaks.breaks("loss")
        return F.mse_loss(pipeline_results, state)


class Arms(Callback):
    """Chooses what fails in step 1, and fails itself."""

    def __init__(self, place: str) -> None:
        self.place, self.is_armed = place, False

    def on_step_start(self, event):
        if event.step == 1 and not self.is_armed:
            self.is_armed, Breaks.place = True, self.place
        Breaks.breaks("step_start")

    def on_microbatch_end(self, event):
        if event.microbatch == 0:
            Breaks.breaks("microbatch")

    def on_gradients_ready(self, event):
        Breaks.breaks("gradients")


PLACES = ["step_start", "forward", "backward", "loss", "microbatch", "gradients"]


def job_symmetric(degrees, places):
    """Runs that fail in step 2, each at another place, and go on by a second fit; the weights at the end, as far as this rank has them."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, size, generator=generator, dtype=torch.float64) for size in (4, 1))
    weights, found = [], []
    for place in places:
        data = AutoDataProvider(TensorDataset(x, y), global_batch_size=4, microbatch_size=1)
        trainer = on_mesh(
            lambda: Blocky().double(), Regression(), data, degrees, callbacks=[Arms(place)], optimizer=AdamW(lr=0.05), total_steps=4, seed=1
        )
        try:
            trainer.fit()
        except ValueError as error:
            found.append((str(error), trainer.step))
            trainer.fit()
        weights.append([(row.layout.box, row.local.detach().clone()) for row in trainer.parameters])
        trainer.close()
    threads = [thread.name for thread in threading.enumerate() if "trainer_kit" in thread.name]
    return weights, found, threads


ALL = MESHES | {"pack": {"dp_shard": 2, "fsdp_sync": "pack"}}


@pytest.mark.parametrize("mesh", ALL)
def test_a_step_that_failed_on_all_ranks_leaves_nothing_behind(mesh):
    """Contracts 24 and 42: gradients half summed, parameters half gathered, the pack: a second fit ends as a run without the error."""
    (expected,), _, _ = job_symmetric({}, ["none"])
    for weights, found, threads in run_on_ranks(2, job_symmetric, ALL[mesh], PLACES):
        assert found == [(f"broken in {place}", 1) for place in PLACES] and threads == []
        for of_run in weights:
            for (box, weight), (_, whole) in zip(of_run, expected, strict=True):
                torch.testing.assert_close(weight, whole[box], rtol=1e-9, atol=1e-12)


class FailsOnce(Callback):
    def on_step_start(self, event):
        if event.step == 1 and not hasattr(self, "failed"):
            self.failed = True
            raise ValueError("once")


def job_positions():
    """Data without a global position: each data rank counts its own packs."""
    parts = [[[t(1)], [t(2)], [t(4)]], [[t(10)], [t(20)], [t(40)]]]
    trainer = on_mesh(Weight(), MeanOutput(), Parts(*parts), MESHES["replicate"], callbacks=[FailsOnce()])
    with pytest.raises(ValueError, match="once"):
        trainer.fit()
    trainer.fit()
    values = [value for _, value in trainer.history.values("train/mean")]
    trainer.close()
    return values


def test_the_packs_of_a_failed_step_come_again_on_every_data_rank():
    """B103 and contract 17: from where each of them was, not from the start of the epoch."""
    assert run_on_ranks(2, job_positions) == [[11.0, 22.0]] * 2  # the record of the first step was lost with the error
