"""PipelineTimeline: what the ranks of a pipeline did in a step of a fit, beside the simulation of it."""

from __future__ import annotations

import pytest
import torch

from trainer_kit import CausalLMTask, MeshStrategy, Trainer
from trainer_kit.callbacks import PipelineTimeline, Progress, Signals, Summary
from trainer_kit.models import Decoder, DecoderConfig
from trainer_kit.pipeline.actions import Action, Kind
from trainer_kit.pipeline.simulation import Costs
from trainer_kit.pipeline.timeline import Timeline
from trainer_kit.testing import run_on_ranks

CONFIG = DecoderConfig(vocab_size=11, num_layers=4, num_heads=1, hidden_size=8, max_seq_len=4)


def job(path, degrees):
    """The rows of the drawing's parts, and whether a later step was recorded."""
    trainer = Trainer(
        lambda stage: Decoder(CONFIG, stage),
        CausalLMTask(),
        [torch.zeros(1, 4, dtype=torch.long)] * 9,
        MeshStrategy(device="cpu", **degrees),
        callbacks=[Progress(False), Summary(False), Signals(False), PipelineTimeline(path, step=1)],
        accumulate=3,
        total_steps=3,
    )
    trainer.fit()
    pipeline = trainer.pipeline
    recorded = None if pipeline is None else pipeline.record
    trainer.close()
    return recorded


def test_a_step_is_drawn_beside_its_simulation(tmp_path):
    path = tmp_path / "drawings" / "timeline.txt"
    assert run_on_ranks(2, job, str(path), {"pp": 2, "pipeline": "zbv"}) == [False, False]
    simulated, measured = path.read_text().split("\n\n")
    assert "zbv: 2 ranks, 4 stages, 3 microbatches, simulated" in simulated and "measured" in measured
    for part in (simulated, measured):
        rows = [line for line in part.splitlines() if line.startswith("rank ")]
        assert len(rows) == 2 and all(row.count("F") == 6 for row in rows)


def test_it_says_that_there_is_nothing_to_draw(tmp_path):
    path = tmp_path / "timeline.svg"
    with pytest.warns(UserWarning, match="no pipeline ranks"):
        assert job(str(path), {}) is None
    assert not path.exists()


def test_costs_are_the_mean_times_of_the_parts():
    f, b = Kind.FORWARD, Kind.BACKWARD
    of_first = [(0, Action(f, 0, 0), 0.0, 1.0), (0, Action(f, 0, 1), 1.0, 4.0)]
    records = [*of_first, (1, Action(f, 1, 0), 1.0, 2.0), (1, Action(b, 1, 0), 2.0, 5.0)]
    costs = Costs.measured(Timeline.from_records(records, 2), 2)
    assert costs == Costs([2.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 3.0])
