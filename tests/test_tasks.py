"""Tasks: the optional methods and when they are called; SupervisedTask and CausalLMTask against torch."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import Gradients, MeanTask, Scalar, quiet_trainer, sgd
from trainer_kit import Args, AutoDataProvider, Callback, CausalLMTask, ForwardInputs, SupervisedTask
from trainer_kit.callbacks import Checkpoint, GradientClipping
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.metrics import Mean
from trainer_kit.optim import Piecewise, StochasticRoundingAdamW


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_setup_and_finalize_are_called_once_each():
    calls = []

    class Counts(MeanTask):
        def setup(self, context):
            calls.append(("setup", context.rank))

        def finalize(self):
            calls.append("finalize")

    trainer = quiet_trainer(Scalar(), Counts(), [t(1)])
    trainer.fit()
    trainer.fit(total_steps=2)
    trainer.evaluate([t(1)])
    trainer.close()
    trainer.close()
    assert calls == [("setup", 0), "finalize"]


def test_inputs_of_a_pack_are_made_before_its_first_forward():
    """The weights of all microbatches are known on the host before anything runs."""
    calls = []

    class Order(MeanTask):
        def build_forward_inputs(self, batch):
            calls.append("inputs")
            return super().build_forward_inputs(batch)

        def compute_loss(self, pipeline_results, state):
            calls.append("loss")
            return pipeline_results

    quiet_trainer(Scalar(), Order(), [t(1)] * 3, accumulate=3).fit()
    assert calls == ["inputs"] * 3 + ["loss"] * 3


def test_forward_and_backward_of_each_microbatch_alternate():
    """Contract 21: never all forwards first, so that one microbatch's activations are alive at a time."""
    calls = []

    class Traced(Scalar):
        def forward(self, c):
            calls.append("forward")
            out = super().forward(c)
            out.register_hook(lambda grad: calls.append("backward"))
            return out

    quiet_trainer(Traced(), MeanTask(), [t(1)] * 3, accumulate=3).fit()
    assert calls == ["forward", "backward"] * 3


def test_weight_and_loss_are_dropped_together():
    """B08: a microbatch of weight 0 whose loss is nan: gradient and logged loss are those of the other one alone."""
    for weigh in ("declared", "returned", "tensor"):
        seen = Gradients()
        trainer = quiet_trainer(Scalar(1.0), MeanTask(weigh), [t(), t(3)], callbacks=[seen], accumulate=2, log_every=1)
        trainer.fit()
        assert float(seen.seen[0]["w"]) == 3.0 and trainer.history.last("train/loss") == (1, 3.0)


def test_a_limit_acts_on_the_gradient_that_is_applied():
    """B59: backward started from 1024 times the loss; the true gradient 0.5 is below a limit of 1 and stays."""

    class Heavy(MeanTask):
        def build_forward_inputs(self, batch):
            return ForwardInputs(inputs=batch, state=batch, weight=1024)

    applied = []

    class Look(Callback):
        def on_before_optimizer_step(self, event):
            applied.append(event.trainer.model.w.grad.item())

    quiet_trainer(Scalar(), Heavy(), [t(0.5)], callbacks=[GradientClipping(1.0), Look()]).fit()
    assert applied == [0.5]


def test_gradients_are_looked_up_when_they_are_scaled():
    """Contract 3: a gradient that was replaced after the backward is the one that is divided and applied."""

    class Replaces(Callback):
        def on_forward_backward_end(self, event):
            event.trainer.model.w.grad = t(8).squeeze()

    trainer = quiet_trainer(Scalar(0.0), MeanTask(), [t(1, 1, 1, 1)], callbacks=[Replaces()])
    trainer.fit()
    assert trainer.model.w.item() == -2.0


def test_a_warm_up_counts_steps_and_not_microbatches():
    """B125: warm-up 4, packs of 3: the rates of the four steps are 1/4, 2/4, 3/4, 1."""
    schedule = Piecewise().linear(1.0, steps=4)
    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 12, accumulate=3, log_every=1, lr_scheduler=schedule)
    trainer.fit()
    assert [value for _, value in trainer.history.values("optim/lr")] == [0.25, 0.5, 0.75, 1.0]


def test_a_schedule_is_stepped_once_per_step_and_never_per_epoch():
    """B128: 5 batches and 2 epochs are 10 calls."""
    calls = []

    class Counts(torch.optim.lr_scheduler.ConstantLR):
        def step(self, epoch=None):
            calls.append(1)
            super().step()

    quiet_trainer(Scalar(), MeanTask(), [t(1)] * 5, epochs=2, lr_scheduler=lambda optimizer: Counts(optimizer, 1.0)).fit()
    assert len(calls) == 10 + 1  # torch calls it once in its constructor


class FailsAt(torch.utils.data.Dataset):
    """Sample i is the number i; one cannot be read."""

    def __init__(self, bad: int):
        self.bad = bad

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError(f"cannot read sample {index}")
        return torch.tensor(float(index))


@pytest.mark.parametrize("settings", [{}, {"prefetch_packs": 2}])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_set_ends_the_fit_with_its_own_text(workers, settings):
    """B103 and B106: the samples before it are seen once, and no worker is left behind."""
    seen = []

    class Notes(MeanTask):
        def build_forward_inputs(self, batch):
            seen.append(batch.item())
            return super().build_forward_inputs(batch)

    data = AutoDataProvider(FailsAt(5), 1, num_workers=workers)
    with pytest.raises(ValueError, match=r"cannot read sample 5"):
        quiet_trainer(Scalar(), Notes(), data, optimizer=sgd(0.0), **settings).fit()
    assert seen == [0, 1, 2, 3, 4] and multiprocessing.active_children() == []


def test_workers_that_persist_leave_at_the_end_of_a_fit():
    """B106: and come back for the next one."""
    data = AutoDataProvider(FailsAt(99), 4, num_workers=2, persistent_workers=True)
    trainer = quiet_trainer(Scalar(), MeanTask(), data, optimizer=sgd(0.0), epochs=2)
    trainer.fit()
    assert multiprocessing.active_children() == [] and trainer.step == 4
    trainer.fit(total_steps=6)
    assert multiprocessing.active_children() == [] and trainer.step == 6


def test_pure_bf16_rounds_without_bias_by_default():
    """B108: without optimizer=, bf16 parameters get the optimizer that keeps small updates on average."""
    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)], precision="bf16", optimizer=None)
    trainer.build()
    assert isinstance(trainer.optimizer, StochasticRoundingAdamW) and trainer.model.w.dtype == torch.bfloat16


def test_metrics_are_updated_without_a_graph_and_per_microbatch():
    seen = []

    class WithMetric(MeanTask):
        def metrics(self):
            return {"c": Mean()}

        def update_metrics(self, metrics, pipeline_results, state):
            seen.append((torch.is_grad_enabled(), len(state)))
            metrics["c"].update(state)

    trainer = quiet_trainer(Scalar(), WithMetric(), [t(1), t(2, 6), t()], accumulate=3, log_every=1)
    trainer.fit()
    assert seen == [(False, 1), (False, 2)]  # a microbatch in which nothing counts takes no part
    assert trainer.history.last("train/c") == (1, 3.0)


def test_anything_with_update_compute_and_reset_is_a_metric():
    class Own:
        def __init__(self):
            self.total = 0.0

        def update(self, value):
            self.total += float(value.sum())

        def compute(self):
            return self.total

        def reset(self):
            self.total = 0.0

    class WithOwn(MeanTask):
        def metrics(self):
            return {"own": Own()}

        def update_metrics(self, metrics, pipeline_results, state):
            metrics["own"].update(state)

    trainer = quiet_trainer(Scalar(), WithOwn(), [t(1), t(2), t(4)], log_every=2)
    trainer.fit()
    assert trainer.history.values("train/own") == [(2, 3.0), (3, 4.0)]


def test_a_metric_of_torchmetrics_is_accepted_and_survives_a_resume(tmp_path):
    """Its state, which it keeps to itself unless asked, is in the checkpoint."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class WithTheirs(MeanTask):
        def metrics(self):
            return {"theirs": torchmetrics.MeanMetric()}

        def update_metrics(self, metrics, pipeline_results, state):
            metrics["theirs"].update(state)

    def run(**settings):
        trainer = quiet_trainer(Scalar(), WithTheirs(), [t(1), t(3), t(8), t(16)], log_every=4, **settings)
        trainer.fit()
        return trainer

    whole = run(callbacks=[Checkpoint(tmp_path, every=2)])
    (tmp_path / "step-00000004").rename(tmp_path.parent / "later")
    resumed = run(callbacks=[Checkpoint(tmp_path, every=2)])
    assert whole.history.last("train/theirs") == resumed.history.last("train/theirs") == (4, 7.0)


def test_args_are_positional_and_keyword_arguments_in_one():
    class Both(Scalar):
        def forward(self, c, *, factor):
            return super().forward(c) * factor

    class Passes(MeanTask):
        def build_forward_inputs(self, batch):
            return ForwardInputs(inputs=Args(batch, factor=3), state=batch, weight=1)

    assert quiet_trainer(Both(2.0), Passes(), [t(1)]).evaluate([t(5)]) == {"val/loss": 30.0}


@pytest.mark.parametrize("batch", [(torch.ones(3, 2), t(1, 2, 3)), {"image": torch.ones(3, 2), "label": t(1, 2, 3)}])
def test_a_supervised_microbatch_weighs_its_samples(batch):
    names = {"inputs": "image", "targets": "label"} if isinstance(batch, dict) else {}
    given = SupervisedTask(F.mse_loss, **names).build_forward_inputs(batch)
    assert given.weight == 3 and torch.equal(given.inputs, torch.ones(3, 2)) and torch.equal(given.state, t(1, 2, 3))


@pytest.mark.parametrize(
    ("targets", "size"),
    [
        ({"class": t(1, 2, 3), "box": torch.ones(3, 4)}, 3),
        ({"name": ["a", "b", "c"]}, 3),
        ({"scale": 2.0, "class": t(1, 2, 3)}, 3),
        ([torch.ones(3, 4), t(1, 2, 3)], 3),
        ((t(1, 2, 3), {"a": t(1, 2, 3)}), 3),
        ([{"boxes": torch.ones(5, 4)}, {"boxes": torch.ones(5, 4)}, {"boxes": torch.ones(5, 4)}], 3),
        ([t(1), t(1, 2), t(1, 2, 3)], 3),
        ([1, 2, 3], 3),
    ],
)
def test_samples_are_counted_in_targets_of_every_form(targets, size):
    """A mapping by its entries, not by its keys; a list of tensors as collating makes it, or with an entry per sample."""
    assert SupervisedTask(F.mse_loss).build_forward_inputs((torch.ones(3, 2), targets)).weight == size


@pytest.mark.parametrize("targets", [torch.tensor(1.0), {"a": 1.0}, None, 3])
def test_targets_that_cannot_be_counted_are_refused(targets):
    with pytest.raises(ConfigurationError, match=r"its targets are .*dim 0"):
        SupervisedTask(F.mse_loss).build_forward_inputs((torch.ones(3, 2), targets))


def test_supervised_metrics_get_what_their_function_says():
    task = SupervisedTask(F.mse_loss, metrics={"error": (Mean, lambda out, target: (out - target).abs())})
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    data = [(t(1, 2)[:, None], t(2, 4)[:, None]), (t(5)[:, None], t(5)[:, None])]
    values = quiet_trainer(model, task, data).evaluate(data)
    assert values["val/error"] == 1.0 and values["val/loss"] == pytest.approx(5 / 3)


class Bigram(nn.Module):
    """Logits of the next token from the token alone."""

    def __init__(self, as_object: bool = False):
        super().__init__()
        self.table, self.as_object, self.calls = nn.Embedding(7, 7), as_object, []

    def forward(self, input_ids, attention_mask=None):
        self.calls.append(attention_mask)
        logits = self.table(input_ids)
        return SimpleNamespace(logits=logits) if self.as_object else logits


def shifted_loss(model: Bigram, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over the tokens that count, in the layout of transformers: position i predicts label i + 1."""
    return F.cross_entropy(model.table(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_causal_loss_is_the_mean_over_tokens_of_the_whole_step(as_object, masked):
    """B01: microbatches of other lengths and numbers of labels, against one sum by torch over one count."""
    torch.manual_seed(0)
    model, seen = Bigram(as_object), Gradients()
    microbatches, total, count = [], 0.0, 0
    for rows, length in ((2, 5), (3, 4), (1, 6)):
        tokens = torch.randint(0, 7, (rows, length))
        labels = torch.where(torch.rand(rows, length) < 0.4, -100, tokens) if masked else tokens
        microbatches.append({"input_ids": tokens, "labels": labels} if masked else tokens)
        total = total + shifted_loss(model, tokens, labels)
        count += int((labels[:, 1:] != -100).sum())
    expected = total / count
    expected.backward()
    gradient, model.table.weight.grad = model.table.weight.grad, None
    trainer = quiet_trainer(model, CausalLMTask(), microbatches, callbacks=[seen], accumulate=3, log_every=1, optimizer=sgd(0.1))
    trainer.fit()
    torch.testing.assert_close(seen.seen[0]["table.weight"], gradient)
    assert trainer.history.last("train/loss")[1] == pytest.approx(expected.item(), rel=1e-6)
    assert trainer.history.last("train/perplexity")[1] == pytest.approx(expected.exp().item(), rel=1e-6)


def test_a_microbatch_without_a_label_adds_nothing():
    """B07: its mean is over nothing."""
    tokens = torch.randint(0, 7, (2, 4), generator=torch.Generator().manual_seed(0))
    empty, full = {"input_ids": tokens, "labels": torch.full_like(tokens, -100)}, {"input_ids": tokens, "labels": tokens}
    model, seen = Bigram(), Gradients()
    loss = shifted_loss(model, tokens, tokens) / (2 * 3)
    (expected,) = torch.autograd.grad(loss, [model.table.weight])
    trainer = quiet_trainer(model, CausalLMTask(), [empty, full], callbacks=[seen], accumulate=2, optimizer=sgd(0.0))
    trainer.fit()
    torch.testing.assert_close(seen.seen[0]["table.weight"], expected)
    assert trainer.evaluate([empty, full])["val/loss"] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("labels", [{}, {"labels": None}])
def test_padding_is_not_predicted(labels):
    """Without labels the attention mask tells what is padding: the mean is over the tokens of the rows without it, by their lengths."""
    torch.manual_seed(0)
    model, seen = Bigram(), Gradients()
    rows = [[torch.randint(0, 7, (length,)) for length in lengths] for lengths in ((5, 2), (3, 4), (1, 1))]
    microbatches = []
    for sequences in rows:
        tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=6)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
        microbatches.append({"input_ids": tokens, "attention_mask": mask, **labels})
    alone = [row[None] for sequences in rows for row in sequences if len(row) > 1]
    expected = sum(shifted_loss(model, row, row) for row in alone) / (4 + 1 + 2 + 3)
    (gradient,) = torch.autograd.grad(expected, [model.table.weight])
    trainer = quiet_trainer(model, CausalLMTask(), microbatches, callbacks=[seen], accumulate=3, log_every=1, optimizer=sgd(0.0))
    trainer.fit()
    torch.testing.assert_close(seen.seen[0]["table.weight"], gradient)
    assert trainer.history.last("train/loss")[1] == pytest.approx(expected.item(), rel=1e-6)
    assert trainer.history.last("train/perplexity")[1] == pytest.approx(expected.exp().item(), rel=1e-6)


def test_given_labels_count_whatever_the_mask_says():
    tokens, mask = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 1, 0, 0]])
    given = CausalLMTask().build_forward_inputs({"input_ids": tokens, "attention_mask": mask, "labels": tokens})
    assert given.state.targets.tolist() == [[2, 3, 4, -100]] and int(given.weight) == 3


def test_a_mask_of_another_form_does_not_tell_of_padding():
    tokens, mask = torch.tensor([[1, 2, 3]]), torch.zeros(1, 1, 3, 3)
    given = CausalLMTask().build_forward_inputs({"input_ids": tokens, "attention_mask": mask})
    assert given.state.targets.tolist() == [[2, 3, -100]] and given.weight == 2


def test_other_entries_go_to_the_model():
    model = Bigram()
    mask = torch.ones(1, 3)
    quiet_trainer(model, CausalLMTask(), [1]).predict([{"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": mask}])
    assert torch.equal(model.calls[0], mask)


@pytest.mark.parametrize(
    "batch", [3, {"tokens": torch.ones(1, 2)}, torch.ones(3), {"input_ids": torch.ones(1, 3), "labels": torch.ones(1, 2)}]
)
def test_tokens_of_another_form_are_refused(batch):
    with pytest.raises(ConfigurationError, match=r"CausalLMTask takes"):
        CausalLMTask().build_forward_inputs(batch)


def test_the_state_of_a_task_comes_back_before_the_first_step(tmp_path):
    class Curriculum(MeanTask):
        level = 0

        def state_dict(self):
            return {"level": self.level}

        def load_state_dict(self, state):
            self.level = state["level"]

    first = quiet_trainer(Scalar(), Curriculum(), [t(1)] * 4)
    first.fit(total_steps=2)
    first.task.level = 3
    first.save_checkpoint(tmp_path / "saved")
    second = quiet_trainer(Scalar(), Curriculum(), [t(1)] * 4)
    second.load_checkpoint(tmp_path / "saved")
    assert second.task.level == 3


def test_a_state_that_nobody_takes_back_is_an_error(tmp_path):
    """Contract 27: nothing is silently left at its fresh value."""

    class Forgets(MeanTask):
        def state_dict(self):
            return {"level": 1}

    trainer = quiet_trainer(Scalar(), Forgets(), [t(1)])
    trainer.save_checkpoint(tmp_path / "saved")
    with pytest.raises(ConfigurationError, match=r"Forgets.*level.*load_state_dict"):
        trainer.load_checkpoint(tmp_path / "saved")
