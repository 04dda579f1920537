"""Context parallelism in a trainer: tasks and models of a user, what is refused, random numbers, losses that routers add."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.parity.pipeline_runs import whole
from tests.support import quiet_trainer, sgd
from trainer_kit import AutoDataProvider, CausalLMTask, ForwardInputs, MeshStrategy, Task
from trainer_kit.exceptions import ConfigurationError, ModelError, UnsupportedError
from trainer_kit.metrics import WeightedMean
from trainer_kit.model import ModelProvider
from trainer_kit.models import DecoderConfig, DecoderProvider, Embedding, MoEConfig, generate
from trainer_kit.parallel import context_attention, parallelize_replicate
from trainer_kit.testing import run_on_ranks

VOCAB, SEQ_LEN = 11, 8
SIZES = {"vocab_size": VOCAB, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_size": 8, "max_seq_len": SEQ_LEN, "init_std": 0.3}


class Rows(torch.utils.data.Dataset):
    """Tokens of which few labels count: in some rows none of the second rank, in others none at all."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.randint(0, VOCAB, (SEQ_LEN,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[2 + index % 2 :] = -100
        if index == 5:
            labels[:] = -100
        return {"input_ids": tokens, "labels": labels}


def data():
    return AutoDataProvider(Rows(), global_batch_size=4, microbatch_size=1)


def trainer_of(model, task, degrees, **settings):
    strategy = MeshStrategy(device="cpu", dp_replicate=1, **degrees)
    return quiet_trainer(model, task, data(), strategy=strategy, total_steps=2, log_every=1, **{"optimizer": sgd(0.1)} | settings)


class OwnAttention(nn.Module):
    """Attention of one head without a causal mask."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.group = None

    def set_sequence_parts(self, parts, attention):
        self.group = parts.group

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(2).chunk(3, -1)
        if self.group is not None:
            return context_attention(q, k, v, self.group, attention="ring", causal=False).squeeze(2)
        return F.scaled_dot_product_attention(q.squeeze(2), k.squeeze(2), v.squeeze(2))


class OwnModel(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(VOCAB, 6), OwnAttention(), nn.Linear(6, VOCAB))


class OwnTask(Task):
    """Predicts each token itself, with a weight per token."""

    def build_forward_inputs(self, batch):
        tokens = batch["input_ids"]
        weights = 1.0 + tokens
        return ForwardInputs(tokens, state={"targets": tokens, "weights": weights}, weight=weights.sum())

    def cut_sequences(self, given, parts):
        state = parts.take_all(given.state, given.inputs.shape)
        return ForwardInputs(parts.take(given.inputs), state=state, weight=state["weights"].sum())

    def compute_loss(self, pipeline_results, state):
        losses = F.cross_entropy(pipeline_results.flatten(0, 1), state["targets"].flatten(), reduction="none")
        return (losses * state["weights"].flatten()).sum() / state["weights"].sum()

    def metrics(self):
        return {"accuracy": WeightedMean()}

    def update_metrics(self, metrics, pipeline_results, state):
        right = (pipeline_results.argmax(-1) == state["targets"]).float()
        metrics["accuracy"].update(right.mean(), right.numel())


def outcome(build, task, degrees):
    """Logged values, weights, evaluation and predictions of a run."""
    torch.set_default_dtype(torch.float64)
    trainer = trainer_of(build(), task(), degrees)
    try:
        trainer.fit()
        names = ("train/loss", "optim/grad_norm", "train/accuracy", "train/perplexity", "train/load_balancing")
        logged = {name: [value for _, value in trainer.history.values(name)] for name in names}
        weights = {row.name: whole(row.parameter) for row in trainer.parameters}
        values = trainer.evaluate(data())
        predicted = trainer.predict([{name: x[None] for name, x in Rows()[index].items()} for index in range(2)])
        return logged, weights, values, predicted
    finally:
        trainer.close()
        torch.set_default_dtype(torch.float32)


def check_equal(found, expected):
    """Of one rank, which may have a part of the weights."""
    for numbers, wanted in ((found[0], expected[0]), (found[2], expected[2])):
        assert numbers.keys() == wanted.keys()
        assert all(numbers[name] == pytest.approx(value, rel=1e-9, nan_ok=True) for name, value in wanted.items())
    assert all(torch.allclose(weight, expected[1][name], rtol=1e-9, atol=1e-12) for name, weight in found[1].items())


def own_model():
    return OwnModel


def llama():
    return DecoderProvider(DecoderConfig(**SIZES))


def mixture():
    moe = MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=6, aux_loss_coef=0.5)
    return DecoderProvider(DecoderConfig(**SIZES, moe=moe))


@pytest.mark.parametrize(
    ("build", "task", "meshes"),
    [
        (own_model, OwnTask, [{"cp_replicate": 2}]),
        (llama, CausalLMTask, [{"cp_shard": 2}]),
        (mixture, CausalLMTask, [{"cp_shard": 2}, {"cp_replicate": 2, "pp": 2}]),
    ],
    ids=["own model and task", "llama", "a loss that routers add"],
)
def test_a_run_is_that_of_one_process(build, task, meshes):
    """Contracts 1, 2 and 15, B123: losses, metrics, weights, evaluation and predictions, where some parts have no label that counts."""
    (expected,) = run_on_ranks(1, outcome, build, task, {})
    for degrees in meshes:
        found = run_on_ranks(2 * degrees.get("pp", 1), outcome, build, task, degrees)
        for each in found:
            check_equal(each, expected)
        assert set.union(*(set(each[1]) for each in found)) == set(expected[1])
        assert [len(each[3]) for each in found] == [2, *([0] * (len(found) - 1))]
        assert all(torch.allclose(part, wanted, rtol=1e-9) for part, wanted in zip(found[0][3], expected[3], strict=True))


class WithoutContext(ModelProvider):
    """Distributes the model and forgets that sequences are cut."""

    def initialize_model_stage(self, ctx):
        return OwnModel()

    def parallelize_model_stage(self, ctx):
        parallelize_replicate(ctx.built(), ctx.mesh("dense")["cp_replicate"])


class TorchAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = OwnAttention(), nn.MultiheadAttention(6, 1)

    def forward(self, x):
        raise AssertionError("must not run")


class Whole(Task):
    """Knows nothing of parts."""

    def build_forward_inputs(self, batch):
        return ForwardInputs(batch["input_ids"], state=batch["labels"], weight=1)

    def compute_loss(self, pipeline_results, state):
        raise AssertionError("must not run")


class OddRows(Rows):
    def __getitem__(self, index):
        return {name: x[:6] for name, x in super().__getitem__(index).items()}


def message(error_type, model, task, degrees, **settings):
    trainer = trainer_of(model, task, degrees, **settings)
    try:
        with pytest.raises(error_type) as caught:
            trainer.fit()
        assert trainer.step == 0
        return str(caught.value)
    finally:
        trainer.close()


def refusals_job():
    found = {
        "task": message(UnsupportedError, OwnModel, Whole(), {"cp_replicate": 2}),
        "model": message(UnsupportedError, lambda: nn.Linear(2, 2), OwnTask(), {"cp_replicate": 2}),
        "torch": message(UnsupportedError, TorchAttention, OwnTask(), {"cp_replicate": 2}),
        "provider": message(UnsupportedError, WithoutContext(), OwnTask(), {"cp_replicate": 2}),
        "compile": message(UnsupportedError, OwnModel, OwnTask(), {"cp_replicate": 2}, compile=True),
        "head": message(UnsupportedError, DecoderProvider(DecoderConfig(**SIZES, head=Embedding())), CausalLMTask(), {"cp_shard": 2}),
    }
    three = DecoderProvider(DecoderConfig(**(SIZES | {"num_heads": 3, "num_kv_heads": 3, "hidden_size": 12})))
    found["heads"] = message(ConfigurationError, three, CausalLMTask(), {"cp_shard": 2, "context_attention": "ulysses"})
    odd = quiet_trainer(
        llama(), CausalLMTask(), AutoDataProvider(OddRows(), 4), strategy=MeshStrategy(device="cpu", cp_shard=2), total_steps=1
    )
    with pytest.raises(ConfigurationError) as caught:
        odd.fit()
    odd.close()
    long = message(ModelError, DecoderProvider(DecoderConfig(**(SIZES | {"max_seq_len": 6}))), CausalLMTask(), {"cp_shard": 2})
    return found | {"odd": str(caught.value), "long": long}


def test_what_cannot_work_on_parts_is_refused():
    """Bad input of context parallelism: before the first step, with the name of what to change."""
    for found in run_on_ranks(2, refusals_job, timeout=120):
        assert "Whole does not say how" in found["task"] and "cut_sequences(self, given, parts)" in found["task"]
        assert "cp=2 of MeshStrategy" in found["model"] and "set_sequence_parts(self, parts, attention)" in found["model"]
        assert "'second' is a MultiheadAttention" in found["torch"]
        assert "parallelize_context in parallelize_model_stage" in found["provider"]
        assert "compile=True" in found["compile"] and "Embedding" in found["head"]
        assert "3 attention heads" in found["heads"] and "context_attention of MeshStrategy" in found["heads"]
        assert "6 positions cannot be cut over cp=2 ranks" in found["odd"]
        assert "8 tokens" in found["long"] and "max_seq_len=6" in found["long"]


def random_job():
    """Of each rank: its stream, what dropout left of ones, and whether generate refuses."""
    config = DecoderConfig(**SIZES, dropout=0.5)
    trainer = trainer_of(DecoderProvider(config), CausalLMTask(), {"cp_replicate": 2, "tp": 2})
    seen = []
    try:
        trainer.build()
        trainer.model.layers["0"].attention.register_forward_pre_hook(lambda *_: seen.append(torch.random.get_rng_state().sum().item()))
        trainer.fit()
        with pytest.raises(UnsupportedError, match="parts of sequences"):
            generate(trainer.model, torch.zeros(1, 2, dtype=torch.int64), 1)
        context = trainer.context
        return context.context_rank, context.tensor_rank, context.random_rank, seen
    finally:
        trainer.close()


def test_each_context_rank_has_random_numbers_of_its_own():
    """Design decision 15, contract 9b: tensor peers share them."""
    streams = {}
    for context_rank, _, random_rank, seen in run_on_ranks(4, random_job):
        assert random_rank == context_rank and len(seen) > 2
        assert streams.setdefault(context_rank, seen) == seen
    assert streams[0] != streams[1]


def recomputed_job():
    """The losses and weights with activations that are computed again, and without."""
    found = []
    for again in (False, True):
        trainer = trainer_of(llama(), CausalLMTask(), {"cp_shard": 2}, activation_checkpointing=again)
        trainer.fit()
        found.append({row.name: whole(row.parameter) for row in trainer.parameters})
        trainer.close()
    return all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_activations_can_be_computed_again():
    assert run_on_ranks(2, recomputed_job) == [True, True]
