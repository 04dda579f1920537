"""What a user sees of a run on ranks: its description, events and prints, files; and one trainer after the other in a process."""

import io
import json
import logging
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.ranks.support import MESHES, MeanOutput, Parts, Weight, on_mesh, t, weight_of
from tests.test_events import listener
from trainer_kit import AutoDataProvider, Callback, MeshStrategy, Trainer
from trainer_kit.callbacks import CSV, Checkpoint, Evaluate, JSONLines, Progress, Summary, TensorBoard, Throughput
from trainer_kit.exceptions import StateError
from trainer_kit.models import Decoder, DecoderConfig
from trainer_kit.testing import run_on_ranks


def data(num_packs: int = 3) -> Parts:
    return Parts(*([[t(1)]] * num_packs for _ in range(2)))


# ---- the description

CONFIG = DecoderConfig(vocab_size=11, num_layers=1, num_heads=2, hidden_size=8, intermediate_size=8, max_seq_len=4, tie_embeddings=True)


def job_describe(degrees):
    samples = AutoDataProvider(TensorDataset(torch.ones(16, 1)), global_batch_size=8, microbatch_size=2)
    trainer = on_mesh(lambda: Decoder(CONFIG), MeanOutput(), samples, degrees, total_steps=4)
    description = trainer.describe()
    trainer.close()
    return {title: dict(rows) for title, rows in description.sections.items()}, description.short()


@pytest.mark.parametrize(("name", "described"), [("replicate", "dp_replicate 2"), ("fsdp", "dp_shard 2"), ("tp", "tp 2")])
def test_the_description_tells_the_mesh_and_what_this_rank_holds(name, described):
    """The numbers of parameters are global ones; accumulation times microbatch size times data ranks is the global batch."""
    (expected, short) = job_describe({})
    assert "this rank" not in short and "on this rank" not in expected["model"]
    found = run_on_ranks(2, job_describe, MESHES[name])
    sizes = {name: parameter.numel() for name, parameter in Decoder(CONFIG).named_parameters()}
    total, norms = sum(sizes.values()), sum(size for name, size in sizes.items() if "norm" in name)
    held = [int(sections["model"].get("on this rank", f"{total}").replace(",", "")) for sections, _ in found]
    assert sum(held) == {"replicate": 2 * total, "fsdp": total, "tp": total + norms}[name] and (name == "replicate" or max(held) < total)
    for rank, (sections, short) in enumerate(found):
        assert sections["model"]["parameters"] == expected["model"]["parameters"] == f"{total:,}"
        assert sections["mesh"]["ranks"] == f"2 ranks on cpu: {described}"
        assert sections["mesh"]["this rank"].startswith(f"{rank}, ") and f"2 ranks on cpu: {described}" in short
        batch = sections["batch"]
        ranks = int(batch.get("data ranks", 1))
        assert ranks == (1 if name == "tp" else 2)
        assert int(batch["accumulation"]) * int(batch["microbatch size"]) * ranks == int(batch["global batch size"]) == 8


# ---- events


def job_events(degrees, folder):
    log: list[str] = []
    trainer = on_mesh(
        Weight(), MeanOutput(), data(), degrees, epochs=2,
        callbacks=[listener(log), Evaluate(data(2), every=2), Checkpoint(folder, every=2, asynchronous=False)],
    )  # fmt: skip
    trainer.fit()
    trainer.predict(data(1))
    trainer.close()
    return log


@pytest.mark.parametrize("name", MESHES)
def test_events_come_in_the_order_of_one_process_on_every_rank(name, tmp_path):
    """B77 on ranks."""
    expected = job_events({}, str(tmp_path / "one"))
    assert {"evaluate_start", "checkpoint_saved", "epoch_end", "metrics", "predict_end"} <= set(expected)
    assert run_on_ranks(2, job_events, MESHES[name], str(tmp_path / name)) == [expected, expected]


# ---- prints, warnings and files


class Uneven(MeanOutput):
    """Declares no weight, which is told where sizes differ."""

    def build_forward_inputs(self, batch):
        given = super().build_forward_inputs(batch)
        given.weight = None
        return given


class Zero(MeanOutput):
    """Nothing counts in any step."""

    def build_forward_inputs(self, batch):
        given = super().build_forward_inputs(batch)
        given.weight = 0
        return given


def job_output(folder):
    import torch.distributed as dist

    printed, shown, logged = io.StringIO(), io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(logged)
    logger = logging.getLogger("trainer_kit")
    logger.addHandler(handler)
    sys.stdout, sys.stderr = printed, shown
    base = Path(folder, str(dist.get_rank()))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callbacks = [
                Progress(True), Summary(True), Throughput(), JSONLines(base / "a.jsonl"), CSV(base / "a.csv"), TensorBoard(base / "tb"),
            ]  # fmt: skip
            trainer = on_mesh(Weight(), Uneven(), Parts([[t(1)]] * 3, [[t(1, 1)]] * 3), MESHES["replicate"], callbacks=callbacks)
            trainer.fit()
            bar = callbacks[0].bar is not None
            trainer.fit()
            trainer.close()
            trainer = on_mesh(Weight(), Zero(), data(), MESHES["fsdp"])
            trainer.fit()
            trainer.close()
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        logger.removeHandler(handler)
    texts = [str(warning.message) for warning in caught]
    return printed.getvalue(), shown.getvalue(), logged.getvalue(), texts, bar


def test_one_rank_prints_warns_and_writes(tmp_path):
    """B70: no bar on rank 1. What concerns all ranks alike is told once, by rank 0."""
    main, other = run_on_ranks(2, job_output, str(tmp_path))
    assert main[4] and not other[4]
    assert main[0].count("2 ranks on cpu") == 1 and main[0].count("fit ended") == 1 and main[0].count("nothing to do") == 1
    assert main[2].count("the weight of its pack is 0") == 3
    assert sum("the task declares no weight" in text for text in main[3]) == 1
    assert other[:4] == ("", "", "", [])
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert [name for name in written if name.startswith("1")] == []
    assert {"0/a.csv", "0/a.jsonl"} <= set(written) and any(name.startswith("0/tb/") for name in written)
    lines = [json.loads(line) for line in (tmp_path / "0" / "a.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[0]["train/loss"] == 1.0


# ---- one after the other


def job_sequence():
    """As in a notebook: a second fit, other meshes in the same process, a trainer that outlives the one that came before it."""
    first = on_mesh(Weight(), MeanOutput(), data(), MESHES["replicate"])
    first.fit(1)
    first.fit(2)
    second = on_mesh(Weight(), MeanOutput(), data(), MESHES["fsdp"])
    second.fit(1)
    first.close()
    first.close()  # twice is once
    with pytest.raises(StateError, match="closed"):
        first.fit()
    second.fit(2)
    values = second.evaluate(data())
    third = on_mesh(Weight(), MeanOutput(), Parts([[t(1)]] * 3), MESHES["tp"])
    third.fit(2)
    weights = [weight_of(trainer) for trainer in (first, second, third)]
    second.close()
    third.close()
    threads = [thread.name for thread in threading.enumerate() if "trainer_kit" in thread.name]
    return weights, values, threads


def test_trainers_come_one_after_the_other():
    """Contract 42: w goes 1, 0, -1 on each mesh."""
    whole, empty = [-1.0], []
    for rank, (weights, values, threads) in enumerate(run_on_ranks(2, job_sequence)):
        assert weights == [whole, empty if rank else whole, whole] and values["val/loss"] == -1.0 and threads == []


class FailsAtTheEnd(Callback):
    def on_fit_end(self, event):
        raise OSError("disk full")


def job_owned():
    """The same where the trainers start the process groups themselves; each ends what it began."""
    import torch.distributed as dist

    dist.destroy_process_group()
    found = []
    for name in ("replicate", "fsdp"):
        trainer = on_mesh(Weight(), MeanOutput(), data(), MESHES[name], callbacks=[FailsAtTheEnd()] if name == "replicate" else [])
        if name == "replicate":
            with pytest.raises(OSError, match="disk full"):
                trainer.fit()
        else:
            trainer.fit()
        found.append(trainer.step)
        trainer.close()
        found.append(dist.is_initialized())
    older = on_mesh(Weight(), MeanOutput(), data(), MESHES["replicate"])
    older.fit(1)
    newer = on_mesh(Weight(), MeanOutput(), data(), MESHES["fsdp"])
    newer.fit(1)
    older.close()
    newer.fit(2)  # the groups that the older one started are there as long as somebody uses them
    found.append(newer.evaluate(data())["val/loss"])
    newer.close()
    found.append(dist.is_initialized())
    return found


def test_process_groups_are_there_as_long_as_a_trainer_uses_them():
    """Contract 42: a trainer that is closed takes nothing from another one, and the last one leaves nothing."""
    expected = [3, False, 3, False, -1.0, False]
    assert run_on_ranks(2, job_owned) == [expected, expected]


def job_without_context_in_the_constructor():
    before = MeshStrategy(device="cpu")
    trainer = Trainer(Weight(), MeanOutput(), data(), before)
    return "context" in vars(trainer)


def test_a_constructor_meets_nobody():
    assert run_on_ranks(2, job_without_context_in_the_constructor) == [False, False]
