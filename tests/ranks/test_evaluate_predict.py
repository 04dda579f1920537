"""Evaluation and prediction on ranks: every sample once, the numbers of one process on every rank, results in order on rank 0."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.ranks.support import MESHES, MeanOutput, Parts, Weight, on_mesh, t
from trainer_kit import AutoDataProvider, Callback, ForwardInputs, Task
from trainer_kit.callbacks import Evaluate
from trainer_kit.metrics import Max, Sum
from trainer_kit.optim import AdamW
from trainer_kit.testing import run_on_ranks


class Net(nn.Module):
    """Two layers that tensor parallelism can cut, and dropout; the one row of the last is uneven for two ranks."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(3, 6), nn.Dropout(dropout), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.drop(torch.tanh(self.one(x))))

    def tensor_plan(self, num_ranks: int) -> dict[str, str]:
        return {"one": "column", "two": "row"}


class Numbered(Task):
    """Samples that carry their number; the number of samples counted, their sum, and the largest one are metrics."""

    def build_forward_inputs(self, batch):
        return ForwardInputs(inputs=batch[0], state=batch, weight=len(batch[0]))

    def compute_loss(self, pipeline_results, state):
        return F.mse_loss(pipeline_results, state[1])

    def metrics(self):
        return {"count": Sum(), "numbers": Sum(), "top": Max()}

    def update_metrics(self, metrics, pipeline_results, state):
        metrics["count"].update(len(state[2]))
        metrics["numbers"].update(state[2])
        metrics["top"].update(state[2])

    def process_outputs(self, pipeline_results, state):
        return {"number": state[2], "output": pipeline_results}


def dataset(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(size, num, generator=generator, dtype=torch.float64) for num in (3, 1))
    return TensorDataset(x, y, torch.arange(size))


def provider(size: int, batch: int, **options) -> AutoDataProvider:
    return AutoDataProvider(dataset(size), global_batch_size=batch, microbatch_size=1, **options)


def numbered(degrees, data, dropout, **settings):
    """A trainer in fp64."""
    return on_mesh(lambda: Net(dropout).double(), Numbered(), data, degrees, seed=5, optimizer=AdamW(lr=0.05), **settings)


def job_passes(degrees):
    trainer = numbered(degrees, provider(13, 4, shuffle=True), 0.0)
    evaluated = provider(11, 6)
    values = trainer.evaluate(evaluated)
    outputs = trainer.predict(evaluated)
    given: list = []
    rest = trainer.predict(evaluated, each=given.append)
    same = len(given) == len(outputs) and all(torch.equal(a["output"], b["output"]) for a, b in zip(given, outputs, strict=True))
    trainer.fit(2)
    trained = trainer.evaluate(trainer.data)
    trainer.close()
    numbers = [int(n) for output in outputs for n in output["number"]]
    return values, trained, numbers, [output["output"].tolist() for output in outputs], same and rest == []


@pytest.mark.parametrize("name", MESHES)
def test_every_sample_counts_once_and_results_come_in_order(name):
    """Promise 1 for passes without training: 11 samples in steps of 6, so that one of the ranks has fewer; rank 0 gets all of them."""
    values, trained, numbers, outputs, _ = job_passes({})
    assert values["val/count"] == 11 and values["val/numbers"] == 55 and values["val/top"] == 10 and trained["val/count"] == 13
    assert numbers == list(range(11))
    main, other = run_on_ranks(2, job_passes, MESHES[name])
    assert main[2] == numbers and main[4] and other[2:] == ([], [], True)
    torch.testing.assert_close(main[3], outputs, rtol=1e-12, atol=1e-12)
    for found in (main, other):
        assert found[0] == pytest.approx(values, rel=1e-12) and found[1] == pytest.approx(trained, rel=1e-9)


def job_unequal(name, packs):
    """Each data rank has its own number of packs and microbatches."""
    trainer = on_mesh(Weight(), MeanOutput(), Parts([[t(1)]], [[t(1)]]), MESHES[name], limit_evaluate_packs=packs)
    data = Parts([[t(1), t(2)], [t(3)], [t(4), t(5), t(6)]], [[t(10, 20)]])
    values, outputs = trainer.evaluate(data), trainer.predict(data)
    trainer.close()
    return values, [output.flatten().tolist() for output in outputs]


@pytest.mark.parametrize("name", ["replicate", "fsdp"])
def test_ranks_with_fewer_packs_fill_up(name):
    """B99 where nothing may be left out: 3 packs of 2, 1 and 3 microbatches on one rank, 1 of one on the other."""
    for rank, (values, outputs) in enumerate(run_on_ranks(2, job_unequal, name, None)):
        assert values == {"val/loss": 6.375, "val/mean": 6.375}  # of 1, 2, 3, 4, 5, 6, 10, 20
        assert outputs == ([[1.0], [2.0], [10.0, 20.0], [3.0], [4.0], [5.0], [6.0]] if rank == 0 else [])


def test_the_number_of_packs_is_limited_on_all_ranks():
    for values, _ in run_on_ranks(2, job_unequal, "fsdp", 2):
        assert values["val/mean"] == 7.2  # of 1, 2, 3, 10, 20


class Between(Callback):
    """Evaluates and predicts directly where that is allowed."""

    def __init__(self, data):
        self.data, self.found = data, []

    def on_epoch_end(self, event):
        self.found.append(event.trainer.evaluate(self.data, name="between")["between/count"])
        self.found.append(len(event.trainer.predict(self.data)))


def job_undisturbed(degrees):
    """The weights of two runs, of which one is evaluated at every turn, and the values of the evaluations."""
    weights, records = [], []
    for is_evaluated in (False, True):
        data = provider(13, 4, shuffle=True)
        callbacks = [Evaluate(data, every=1, at_start=True), Between(provider(7, 4))] if is_evaluated else []
        trainer = numbered(degrees, data, 0.3, epochs=2, callbacks=callbacks)
        trainer.fit()
        weights.append([row.local.detach().clone() for row in trainer.parameters])
        records.append([trainer.history.values("train/loss"), trainer.history.values("optim/grad_norm")])
        found, steps = (callbacks[1].found, [step for step, _ in trainer.history.values("val/loss")]) if callbacks else ([], [])
        trainer.close()
    same = all(torch.equal(a, b) for a, b in zip(*weights, strict=True)) and records[0] == records[1]
    return same, found, steps


@pytest.mark.parametrize("name", MESHES)
def test_evaluations_change_nothing_of_the_run(name):
    """Contracts 13 and 25 on ranks: bitwise the same weights and losses, with dropout.

    By request on the data that is being read, and directly on other data.
    """
    for rank, (same, found, steps) in enumerate(run_on_ranks(2, job_undisturbed, MESHES[name])):
        assert same and found == [7, 7 if rank == 0 else 0] * 2
        assert steps == list(range(9))


class Sequence(Task):
    """Outputs of tensor-parallel models may be cut over the ranks: the classes here."""

    def build_forward_inputs(self, batch):
        return ForwardInputs(inputs=batch, weight=len(batch))

    def compute_loss(self, pipeline_results, state):
        return pipeline_results.mean()


def job_cut_outputs():
    from trainer_kit.models import Decoder, DecoderConfig

    config = DecoderConfig(vocab_size=11, num_layers=1, num_heads=2, hidden_size=8, intermediate_size=8, max_seq_len=4)
    trainer = on_mesh(lambda: Decoder(config), Sequence(), Parts([[torch.zeros(1, 4, dtype=torch.long)]]), MESHES["tp"])
    outputs = trainer.predict([torch.arange(8).view(2, 4), torch.arange(4).view(1, 4)])
    trainer.close()
    return [(type(output) is torch.Tensor, tuple(output.shape), str(output.device)) for output in outputs]


def test_predictions_of_a_cut_model_are_whole():
    main, other = run_on_ranks(2, job_cut_outputs)
    assert main == [(True, (2, 4, 11), "cpu"), (True, (1, 4, 11), "cpu")] and other == []
