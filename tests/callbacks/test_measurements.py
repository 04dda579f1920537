"""Throughput, MemoryMonitor, GarbageCollection and Profiler: what they count, and that they leave nothing behind."""

import gc
import gzip
import json
import os
from types import SimpleNamespace

import pytest
import torch

from trainer_kit import events
from trainer_kit.callbacks import GarbageCollection, MemoryMonitor, Profiler, Throughput
from trainer_kit.callbacks.memory_monitor import resident_bytes


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("trainer_kit.callbacks.throughput.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def forward_backward(trainer, callback, clock, seconds, microbatches):
    step = trainer.step
    callback.on_step_start(events.StepStart(trainer=trainer, step=step, microbatches=microbatches))
    clock.now += seconds
    callback.on_forward_backward_end(events.ForwardBackwardEnd(trainer=trainer, step=step))
    trainer.step += 1


def test_speed_without_evaluations_and_saves(fake_trainer, clock):
    """Closed form: 4 steps of 2 s with 6 samples and 30 tokens each; an evaluation and a save between them take other time."""
    trainer = fake_trainer(log_every=5)
    callback = Throughput(tokens=lambda batch: batch["x"].numel(), flops_per_token=10.0, peak_flops=1500.0)
    trainer.start(callback)
    microbatches = [{"x": torch.zeros(4, 5)}, {"x": torch.zeros(2, 5)}]
    forward_backward(trainer, callback, clock, 50.0, microbatches)  # the first is not counted
    for _ in range(2):
        forward_backward(trainer, callback, clock, 2.0, microbatches)
    callback.on_evaluate_start(events.EvaluateStart(trainer=trainer))
    clock.now += 1000.0
    callback.on_evaluate_end(events.EvaluateEnd(trainer=trainer, values={}))
    callback.on_checkpoint_start(events.CheckpointStart(trainer=trainer, path="p", step=3))
    clock.now += 500.0  # the part of a background save that holds up the loop ends with the next step
    forward_backward(trainer, callback, clock, 2.0, microbatches)
    callback.on_checkpoint_saved(events.CheckpointSaved(trainer=trainer, path="p", step=3))
    forward_backward(trainer, callback, clock, 2.0, microbatches)
    assert dict(trainer.logged) == pytest.approx(
        {"speed/step_seconds": 2.0, "speed/samples_per_second": 3.0, "speed/tokens_per_second": 15.0, "speed/mfu": 15 * 10 / 1500}
    )


def test_all_data_ranks_count_and_every_device_has_its_peak(fake_trainer, clock):
    trainer = fake_trainer(log_every=2)
    trainer.context.num_data_ranks, trainer.context.world_size = 2, 4
    callback = Throughput(flops_per_sample=10.0, peak_flops=100.0)
    trainer.start(callback)
    for _ in range(2):
        forward_backward(trainer, callback, clock, 0.5, [torch.zeros(3, 1)])
    logged = dict(trainer.logged)
    assert logged["speed/samples_per_second"] == pytest.approx(2 * 3 / 0.5)
    assert logged["speed/mfu"] == pytest.approx(12 * 10 / (100 * 4))


def test_an_unknown_device_has_no_mfu_and_says_so(fake_trainer, clock):
    """Contract 45: it is not counted as another device."""
    trainer, callback = fake_trainer(log_every=2), Throughput(flops_per_sample=10.0)
    trainer.start(callback)
    for _ in range(2):
        forward_backward(trainer, callback, clock, 0.5, [torch.zeros(3, 1)])
    assert "speed/mfu" not in dict(trainer.logged)
    assert "'cpu' is unknown" in callback.describe() and "peak_flops=" in callback.describe()


def test_memory_is_logged_with_the_records(fake_trainer):
    """The process holds what the system says it holds, to a factor (pages come and go)."""
    trainer, callback = fake_trainer(log_every=2, total_steps=5), MemoryMonitor()
    for step in range(5):
        before = len(trainer.logged)
        callback.on_forward_backward_end(events.ForwardBackwardEnd(trainer=trainer, step=step))
        assert (len(trainer.logged) > before) == (step in (1, 3, 4))
    with open("/proc/self/status", encoding="ascii") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    name, value = trainer.logged[-1]
    assert name == "memory/resident_gib" and value * 2**20 == pytest.approx(kib, rel=0.2)


def test_resident_memory_grows_with_what_is_held():
    before = resident_bytes()
    held = bytearray(os.urandom(1)) * (64 * 2**20)
    assert resident_bytes() - before > 48 * 2**20
    del held


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_at_fixed_steps_and_the_state_comes_back(fake_trainer, monkeypatch, enabled):
    """B130 and contract 42: collections at steps k and 2k only; gc is afterwards what it was, however often closed."""
    was = gc.isenabled()
    collections = []
    trainer, callback = fake_trainer(), GarbageCollection(every=3)
    try:
        gc.enable() if enabled else gc.disable()
        monkeypatch.setattr(gc, "collect", lambda *_: collections.append(trainer.step))
        for _ in range(2):
            trainer.start(callback)
            assert not gc.isenabled()
            for _ in range(4):
                trainer.finish_step(callback)
            callback.close()
            callback.close()
            assert gc.isenabled() == enabled
        assert collections == [3, 6]
    finally:
        gc.enable() if was else gc.disable()


def test_cyclic_garbage_stays_bounded(fake_trainer):
    """B130: the opposite leak; at most the cycles of `every` steps are alive."""
    alive = 0

    class Node:
        def __init__(self):
            nonlocal alive
            alive += 1
            self.me = self

        def __del__(self):
            nonlocal alive
            alive -= 1

    trainer, callback, most = fake_trainer(), GarbageCollection(every=5), 0
    trainer.start(callback)
    try:
        for _ in range(10):
            Node()
            most = max(most, alive)
            trainer.finish_step(callback)
    finally:
        callback.close()
    assert most == 5 and alive == 0


def test_the_profiler_writes_one_trace_per_round(fake_trainer, tmp_path):
    trainer, callback = fake_trainer(), Profiler(tmp_path, wait=1, warmup=1, active=1, repeat=2)
    trainer.start(callback)
    for _ in range(8):
        torch.ones(4).add(1)
        trainer.finish_step(callback)
    callback.close()
    traces = sorted(p.name for p in tmp_path.iterdir())
    assert traces == ["trace-rank0-step00000003.json.gz", "trace-rank0-step00000006.json.gz"]
    with gzip.open(tmp_path / traces[0]) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::add" in names


def test_the_profiler_is_stopped_on_any_way_out(fake_trainer, tmp_path):
    """Contract 42: closed in the middle of a recording; another profiler can start afterwards."""
    trainer, callback = fake_trainer(), Profiler(tmp_path, wait=0, warmup=1, active=5)
    trainer.start(callback)
    for _ in range(3):
        trainer.finish_step(callback)
    callback.close()
    callback.close()
    with torch.profiler.profile() as other:
        torch.ones(4).add(1)
    assert any(event.key == "aten::add" for event in other.key_averages())
