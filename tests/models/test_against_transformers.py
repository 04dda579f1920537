"""The decoder and transformers agree on outputs and gradients, for each model and head of the catalogue. Contract 38, less the files."""

from dataclasses import replace

import pytest
import torch

from tests.models.against_transformers import our_config, our_state, quiet, theirs
from trainer_kit.models import Decoder, Embedding, Llama3Scaling, SequenceClassification, TokenClassification, YaRNScaling
from trainer_kit.models.load_balance import load_balancing_loss

pytest.importorskip("transformers")

IDS = torch.randint(1, 37, (3, 20), generator=torch.Generator().manual_seed(1))
RIGHT = (torch.arange(20) < torch.tensor([[20], [13], [1]])).long()
LEFT = RIGHT.flip(1)
MASKS = {"right": RIGHT, "left": LEFT}


def pair(name, head=None, scaling=None, **options):
    model = theirs(name, **options)
    config = our_config(model.config, rope_scaling=scaling)
    ours = Decoder(config if head is None else replace(config, head=head)).eval()
    ours.load_state_dict(our_state(model))
    return model, ours


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 12, "rms_norm_eps": 1e-3}),
        ("Qwen3ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
        ("Qwen3MoeForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": False, "tie_word_embeddings": True}),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1], "num_experts_per_tok": 1, "norm_topk_prob": False}),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2, "moe_intermediate_size": 15}),  # no whole 16 bytes: the loop
    ],
)
def test_logits_and_gradients_of_language_models(name, options):
    model, ours = pair(name, **options)
    logits, found = model(IDS).logits, ours(IDS)
    close(found, logits)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    (found * weights).sum().backward()
    gradients = model.state_dict() | {name: parameter.grad for name, parameter in model.named_parameters()}
    if model.config.tie_word_embeddings:
        gradients["lm_head.weight"] = gradients["model.embed_tokens.weight"]
    with torch.no_grad():
        model.load_state_dict(gradients)
    for name, expected in our_state(model).items():
        parameter = ours.get_parameter(name)
        assert (parameter.grad - expected).norm() <= 1e-4 * expected.norm(), name


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("side", MASKS)
def test_padding_on_either_side_leaves_the_tokens_as_they_are(name, side):
    model, ours = pair(name)
    real = MASKS[side] != 0
    given = {"input_ids": IDS, "attention_mask": MASKS[side]}
    found, expected = ours(given), model(**given).logits
    assert found.isfinite().all()
    close(found[real], expected[real])
    found[real].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


def test_positions_are_those_that_are_given():
    model, ours = pair("Qwen3ForCausalLM")
    given = {"input_ids": IDS, "attention_mask": LEFT, "position_ids": (LEFT.cumsum(-1) - 1).clamp(min=0)}
    close(ours(given)[LEFT != 0], model(**given).logits[LEFT != 0])
    one_row = {"input_ids": IDS, "position_ids": torch.arange(5, 25)[None]}
    close(ours(one_row), model(**one_row).logits)


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, YaRNScaling(4.0, 16)),
        (
            {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            Llama3Scaling(4.0, 16),
        ),
    ],
)
def test_stretched_positions(parameters, scaling):
    model, ours = pair("LlamaForCausalLM", scaling=scaling, rope_parameters=parameters | {"rope_theta": 10_000.0})
    close(ours(IDS), model(IDS).logits)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("side", MASKS)
def test_sequence_classification_scores_the_last_token(family, side):
    model, ours = pair(f"{family}ForSequenceClassification", SequenceClassification(num_labels=5, pad_token_id=0), num_labels=5)
    given = {"input_ids": IDS * MASKS[side], "attention_mask": MASKS[side]}
    close(ours(given), model(**given).logits)
    close(ours(IDS), model(IDS).logits)
    by_mask = replace(ours.config, head=SequenceClassification(num_labels=5))
    masked = Decoder(by_mask).eval()
    masked.load_state_dict(ours.state_dict())
    close(masked({"input_ids": IDS, "attention_mask": MASKS[side]}), ours(given))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe"])
def test_token_classification_scores_every_token(family):
    model, ours = pair(f"{family}ForTokenClassification", TokenClassification(num_labels=5), num_labels=5)
    close(ours(IDS), model(IDS).logits)
    ours.train()
    assert not torch.equal(ours(IDS), ours(IDS)), "dropout 0.1"


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("side", MASKS)
def test_embeddings_pool_the_hidden_states_of_the_base_model(family, side):
    mask = MASKS[side]
    given = {"input_ids": IDS, "attention_mask": mask}
    model, ours = pair(f"{family}Model", Embedding(normalize=False))
    hidden = model(**given).last_hidden_state
    last = [19, 12, 0] if side == "right" else [19, 19, 19]
    close(ours(given), hidden[torch.arange(3), last])
    for head, expected in (
        (Embedding(pooling="mean", normalize=False), torch.stack([h[m != 0].mean(0) for h, m in zip(hidden, mask, strict=True)])),
        (Embedding(), torch.nn.functional.normalize(hidden[torch.arange(3), last])),
    ):
        ours = Decoder(replace(ours.config, head=head)).eval()
        ours.load_state_dict(our_state(model))
        close(ours(given), expected)


@pytest.mark.parametrize("mask", [None, RIGHT])
def test_the_load_balancing_loss_of_one_layer(mask):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with quiet():
        expected = load_balancing_loss_func((logits,), 8, 3, mask)
    probabilities = logits.softmax(-1)
    found = load_balancing_loss(probabilities, probabilities.topk(3).indices, None if mask is None else mask.flatten() != 0)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(value, logits)[0] for value in (found, expected))
    torch.testing.assert_close(ours, theirs)
