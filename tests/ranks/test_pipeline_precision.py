"""Precision, recomputed activations and compiled blocks over pipeline stages: losses, norms and weights are those of one process."""

import pytest
import torch

from tests.ranks.stage_runs import LAYOUTS, assert_same_history, history, weights_of
from tests.support import quiet_trainer, sgd
from trainer_kit import AutoDataProvider, CausalLMTask, MeshStrategy
from trainer_kit.models import Decoder, DecoderConfig
from trainer_kit.optim import AdamW
from trainer_kit.testing import run_on_ranks

CONFIG = DecoderConfig(
    vocab_size=17, num_layers=4, num_heads=2, num_kv_heads=1, hidden_size=16, intermediate_size=24, max_seq_len=6, tie_embeddings=True
)
SETTINGS = {
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16": {"precision": "bf16"},
    "bf16, fp32 gradients": {"precision": "bf16", "grad_dtype": "fp32", "optimizer": sgd(0.1)},
    "recomputed by name in bf16": {"activation_checkpointing": ("layers.0", "head"), "precision": "bf16-mixed"},
}


def batches():
    generator = torch.Generator().manual_seed(0)
    return AutoDataProvider(torch.randint(0, 17, (24, 6), generator=generator), global_batch_size=8, microbatch_size=2)


def fitted(layout, **settings):
    strategy = MeshStrategy(device="cpu", **({"dp_replicate": 1} | LAYOUTS[layout]))
    settings = {"total_steps": 3, "log_every": 1, "optimizer": AdamW(lr=0.01), "seed": 2} | settings
    if settings["precision"] == "bf16" and "grad_dtype" not in settings:
        settings["optimizer"] = None  # StochasticAdamW
    trainer = quiet_trainer(lambda stage: Decoder(CONFIG, stage), CausalLMTask(), batches(), strategy=strategy, **settings)
    trainer.fit()
    found = history(trainer), weights_of(trainer), [str(row.local.dtype) for row in trainer.parameters]
    trainer.close()
    return found


def job_precision(layout):
    return {name: fitted(layout, **({"precision": "fp32"} | settings)) for name, settings in SETTINGS.items()}


@pytest.fixture(scope="module")
def of_one_process():
    return job_precision("one")


@pytest.mark.parametrize("layout", ["zb1p"])
def test_precision_and_recomputing_are_those_of_one_process(layout, of_one_process):
    """Contracts 5, 22 and 23: with tied embeddings; a schedule that splits backwards runs those that recompute whole."""
    ranks = run_on_ranks(2, job_precision, layout)
    for name, expected in of_one_process.items():
        compare([found[name] for found in ranks], expected, is_bf16=name in ("bf16", "bf16, fp32 gradients"))


def compare(ranks, expected, is_bf16=False):
    records, weights, dtypes = expected
    assert set(dtypes) == {"torch.bfloat16" if is_bf16 else "torch.float32"}
    assert {name for _, found, _ in ranks for name in found} == weights.keys()
    for found, held, kinds in ranks:
        assert kinds[0] == dtypes[0] and found == ranks[0][0]
        for name, (_, value) in held.items():
            torch.testing.assert_close(value, weights[name][1], rtol=1e-5, atol=1e-2 if is_bf16 else 1e-6)
    assert_same_history(ranks[0][0], records, rel=1e-5)


def keep_graph(graph, inputs):
    """A backend of torch.compile that runs what was captured as it is."""
    GRAPHS.append(graph)
    return graph.forward


GRAPHS: list = []


def job_compiled(layout):
    GRAPHS.clear()
    torch.compiler.reset()
    recomputed = ("layers.0",)  # so the first stage runs its backwards whole, and the second one splits them
    found = fitted(layout, precision="fp32", total_steps=2, compile={"backend": keep_graph}, activation_checkpointing=recomputed)
    torch.compiler.reset()
    return found, len(GRAPHS)


# torch.compile looks at `.grad` of the inputs it is given, and torch warns of that itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_are_those_of_one_process():
    """Contract 23: compiled graphs come whole, on a schedule that splits; each layer is a block, one per stage too."""
    expected = fitted("one", precision="fp32", total_steps=2)
    ranks = run_on_ranks(2, job_compiled, "zb1p")
    assert all(number >= 1 for _, number in ranks)
    compare([found for found, _ in ranks], expected)
