"""Files of transformers and ours for models with every head: each side reads what the other wrote. Language models: `tests/parity`."""

import json

import pytest
import torch

from tests.support import MeanTask, quiet_trainer
from trainer_kit.models import Embedding, SequenceClassification, TokenClassification, hf_config, provider_from_hf

transformers = pytest.importorskip("transformers")

IDS = torch.randint(1, 37, (3, 10), generator=torch.Generator().manual_seed(1))
SIZES = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
CASES = [
    ("AutoModel", "llama", Embedding(pad_token_id=0)),
    ("AutoModel", "qwen3_moe", Embedding(pad_token_id=0)),
    ("AutoModelForSequenceClassification", "qwen3", SequenceClassification(num_labels=3, pad_token_id=0)),
    ("AutoModelForSequenceClassification", "qwen3_moe", SequenceClassification(num_labels=3, pad_token_id=0)),
    ("AutoModelForTokenClassification", "llama", TokenClassification(num_labels=3)),
]


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def outputs(network):
    """What our heads give: scores, or normalised vectors of the last tokens."""
    found = network.eval()(IDS)
    return found.logits if "logits" in found else torch.nn.functional.normalize(found.last_hidden_state[:, -1], dim=-1)


@pytest.mark.parametrize(("kind", "model_type", "head"), CASES)
@torch.no_grad()
def test_each_side_reads_the_other_and_computes_the_same(kind, model_type, head, tmp_path):
    """Contract 38, for the heads."""
    torch.manual_seed(0)
    auto = getattr(transformers, kind)
    settings = transformers.AutoConfig.for_model(model_type, **SIZES, **(EXPERTS if model_type == "qwen3_moe" else {}), num_labels=3)
    theirs = auto.from_config(settings)
    theirs.save_pretrained(tmp_path / "in")
    provider = provider_from_hf(tmp_path / "in")
    assert provider.config.head == head
    trainer = quiet_trainer(provider, MeanTask(), [IDS], source_model=tmp_path / "in")
    trainer.build()
    torch.testing.assert_close(trainer.model.eval()(IDS), outputs(theirs), rtol=1e-5, atol=1e-5)

    trainer.export(tmp_path / "out")
    trainer.close()
    (tmp_path / "out" / "config.json").write_text(json.dumps(hf_config(provider.config)))
    again, report = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in theirs.state_dict().items())
    assert torch.equal(outputs(again), outputs(theirs))
