"""Evaluation and prediction over pipeline stages: the numbers of one process, on the layout that trains, and nothing of the run changes."""

import pytest
import torch

from tests.ranks.stage_runs import LAYOUTS, Nets, OfRanks, history, num_ranks, provider, rows, run_of, weights_of
from trainer_kit import Callback
from trainer_kit.callbacks import Evaluate
from trainer_kit.testing import run_on_ranks

STAGED = ["interleaved", "zbv replicate"]


def calls(trainer):
    """How many forwards each layer of this rank ran for real."""
    return {int(layer.calls) for stage in trainer.stages for layer in stage.layers.values()}


def job_passes(layout):
    trainer = run_of(layout, provider(13, 4, shuffle=True))
    evaluated = provider(11, 6)
    values = trainer.evaluate(evaluated)
    after_evaluation = calls(trainer)
    outputs = trainer.predict(evaluated)
    given: list = []
    rest = trainer.predict(evaluated, each=given.append)
    assert rest == [] and len(given) == len(outputs)
    assert all(torch.equal(a["output"], b["output"]) for a, b in zip(given, outputs, strict=True))
    trainer.fit(2)
    trained = trainer.evaluate(trainer.data)
    trainer.close()
    numbers = [int(number) for output in outputs for number in output["number"]]
    return values, trained, numbers, [output["output"].tolist() for output in outputs], after_evaluation


@pytest.mark.parametrize("layout", STAGED)
def test_every_sample_counts_once_and_results_come_in_order(layout):
    """Contract 25 and promise 1: 11 samples in steps of 6, so that data ranks have different numbers of microbatches."""
    values, trained, numbers, outputs, _ = job_passes("one")
    assert values["val/count"] == 11 and values["val/numbers"] == 55 and values["val/top"] == 10 and trained["val/count"] == 13
    assert numbers == list(range(11))
    main, *others = run_on_ranks(num_ranks(layout), job_passes, layout)
    assert main[2] == numbers and all(other[2] == [] for other in others)
    torch.testing.assert_close(main[3], outputs, rtol=1e-12, atol=1e-12)
    for found in (main, *others):
        assert found[0] == pytest.approx(values, rel=1e-12) and found[1] == pytest.approx(trained, rel=1e-9)
    # What only fills up leaves buffers as they are: each layer counted the samples of its data rank, 11 on all of them.
    num_data_ranks = num_ranks(layout) // LAYOUTS[layout]["pp"]
    counts = [found[4] for found in (main, *others)]
    assert all(sum(min(count) for count in counts[first : first + num_data_ranks]) == 11 for first in range(0, len(counts), num_data_ranks))
    assert all(len(count) == 1 for count in counts)


UNEQUAL = OfRanks([[rows(1), rows(2, 12)], [rows(3)], [rows(4), rows(5), rows(6)]], [[rows(10, 20)]])


def job_unequal(layout):
    """The second data rank has one microbatch in the first pack, and none in the others."""
    trainer = run_of(layout, OfRanks([[rows(1)]], [[rows(2)]]))
    values, outputs = trainer.evaluate(UNEQUAL), trainer.predict(UNEQUAL)
    trainer.close()
    limited = run_of(layout, OfRanks([[rows(1)]], [[rows(2)]]), limit_evaluate_packs=1)
    count = limited.evaluate(UNEQUAL)["val/count"]
    limited.close()
    return values, [output["number"].tolist() for output in outputs], [output["output"] for output in outputs], count


@pytest.mark.parametrize("layout", ["zbv replicate", "shard"])
def test_data_ranks_without_microbatches_fill_up(layout):
    """B99 where nothing may be left out."""
    values, numbers, outputs, count = job_unequal("one")
    assert numbers == [[1], [2, 12], [10, 20], [3], [4], [5], [6]] and values["val/count"] == 9 and count == 5
    for rank, found in enumerate(run_on_ranks(num_ranks(layout), job_unequal, layout)):
        assert found[0] == pytest.approx(values, rel=1e-12) and found[3] == count
        assert found[1] == (numbers if rank == 0 else [])
        torch.testing.assert_close(found[2], outputs if rank == 0 else [], rtol=1e-12, atol=1e-12)


class Between(Callback):
    """Evaluates and predicts directly where that is allowed."""

    def __init__(self, data):
        self.data, self.found = data, []

    def on_epoch_end(self, event):
        self.found.append(event.trainer.evaluate(self.data, name="between")["between/count"])
        self.found.append(len(event.trainer.predict(self.data)))


def job_undisturbed(layout):
    """Two runs with dropout, of which one is evaluated at every turn."""
    runs, values, found, steps = [], {}, [], []
    for is_evaluated in (False, True):
        data = provider(7, 4, shuffle=True)
        callbacks = [Evaluate(data, every=1, at_start=True), Between(provider(7, 4))] if is_evaluated else []
        trainer = run_of(layout, data, *callbacks, model=Nets(dropout=0.3), epochs=2)
        trainer.fit()
        # Data ranks have seen different samples, and an evaluation makes their buffers the same.
        buffers = trainer.parameters.buffers if trainer.context.num_data_ranks == 1 else {}
        seen = {name: int(buffer) for name, buffer in buffers.items()}
        records = {name: points for name, points in history(trainer).items() if name.startswith(("train/", "optim/"))}
        runs.append((weights_of(trainer), seen, records))
        if is_evaluated:
            found, steps = callbacks[1].found, [step for step, _ in trainer.history.values("val/loss")]
            values = trainer.history.last("val/loss")
        trainer.close()
    (weights, seen, records), (others, *rest) = runs
    same = all(torch.equal(weights[name][1], others[name][1]) for name in weights)
    return same and rest == [seen, records], found, steps, values, set(seen.values())


@pytest.mark.parametrize("layout", ["1f1b", "zbv shard"])
def test_evaluations_change_nothing_of_the_run(layout):
    """Contracts 13 and 25: bitwise the same weights, losses and buffers, with dropout; by request on data that is read, and directly."""
    ranks = run_on_ranks(num_ranks(layout), job_undisturbed, layout)
    for rank, (same, found, steps, value, seen) in enumerate(ranks):
        assert same and found == [7, 7 if rank == 0 else 0] * 2
        assert steps == list(range(5)) and value == ranks[0][3]
        assert seen == ({14} if num_ranks(layout) == 2 else set())
