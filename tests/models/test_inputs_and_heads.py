"""What a decoder is given and gives: masks and positions, on one stage and on several, and the heads."""

from dataclasses import replace

import pytest
import torch

from trainer_kit import CausalLMTask
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.model import ModelCaller, StageInfo, build_stage
from trainer_kit.models import Decoder, Embedding, MoEConfig, SequenceClassification, TokenClassification, generate
from trainer_kit.pipeline.transfer_spec import transfer_spec

IDS = torch.tensor([[1, 5, 2, 9, 4, 3, 3], [7, 7, 1, 2, 10, 6, 8], [3, 3, 3, 3, 3, 3, 3]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 0, 0]])
DOCUMENTS = torch.tensor([[4, 4, 5, 5, 5, -1, -1], [0, 0, 0, 0, 0, 0, 0], [9, 2, 2, 2, 7, 7, -1]])
BATCHES = {
    "ids": IDS,
    "ids in a mapping": {"input_ids": IDS},
    "no mask": {"input_ids": IDS, "attention_mask": None},
    "mask": {"input_ids": IDS, "attention_mask": MASK},
    "positions": {"input_ids": IDS, "position_ids": POSITIONS[:1]},
    "both": {"input_ids": IDS, "attention_mask": MASK.bool(), "position_ids": POSITIONS},
    "documents": {"input_ids": IDS, "document_ids": DOCUMENTS},
    "documents and all": {"input_ids": IDS, "document_ids": DOCUMENTS, "attention_mask": MASK, "position_ids": POSITIONS},
}
HEADS = {
    "tokens": TokenClassification(num_labels=3, dropout=0.0),
    "tokens without bias": TokenClassification(num_labels=3, bias=False),
    "sequences": SequenceClassification(num_labels=3, pad_token_id=3),
    "sequences by mask": SequenceClassification(num_labels=3),
    "last": Embedding(pad_token_id=3),
    "mean": Embedding(pooling="mean", normalize=False),
}


def built(config, context, stage=None):
    return build_stage(lambda stage: Decoder(config, stage), context, stage, seed=0).eval()


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("head", [None, *HEADS.values()], ids=["logits", *HEADS])
def test_stages_pass_on_what_the_others_need(config, context, batch, head):
    """The outputs of two and three stages are those of one; ids alone go on as one tensor of hidden states."""
    config = replace(config, num_layers=3, **({} if head is None else {"head": head}))
    expected = built(config, context)(batch)
    for num_stages in (2, 3):
        x = batch
        for index in range(num_stages):
            part = built(config, context, StageInfo(index, num_stages))
            if index:
                received = transfer_spec(part, batch, "incoming")
                x = received.rebuild(received.flatten(x))
            x = ModelCaller(part)(x)
            if index < num_stages - 1:
                transfer_spec(part, batch, "outgoing").flatten(x)
                has_more = isinstance(batch, dict) and len(batch) > 1 and batch.get("attention_mask", 1) is not None
                assert isinstance(x, dict) == (has_more or getattr(head, "pad_token_id", None) is not None)
        torch.testing.assert_close(x, expected)


def test_the_task_of_language_models_gives_a_mask_to_the_model(config, context):
    """Tokens after the padding of another sample have the logits that they have alone."""
    model = built(config, context)
    given = CausalLMTask().build_forward_inputs({"input_ids": IDS, "attention_mask": MASK})
    logits = ModelCaller(model)(given.inputs, given.shared)
    torch.testing.assert_close(logits[0, :5], model(IDS[:1, :5])[0])
    torch.testing.assert_close(logits[1], model(IDS[1:2])[0])
    alone = {"input_ids": IDS[2:, 6:], "position_ids": torch.tensor([[6]])}
    torch.testing.assert_close(logits[2, 6], model(alone)[0, 0])


def test_packed_documents_are_as_if_each_were_alone(config, context):
    """Attention stays within a document and positions start again there; labels that are not given leave out starts and padding."""
    model = built(config, context)
    given = CausalLMTask().build_forward_inputs({"input_ids": IDS, "document_ids": DOCUMENTS})
    logits = ModelCaller(model)(given.inputs, given.shared)
    for row, start, stop in ((0, 0, 2), (0, 2, 5), (1, 0, 7), (2, 0, 1), (2, 1, 4), (2, 4, 6)):
        torch.testing.assert_close(logits[row, start:stop], model(IDS[row : row + 1, start:stop])[0])
        expected = [*IDS[row, start + 1 : stop].tolist(), -100]
        assert given.state.targets[row, start:stop].tolist() == expected
    assert given.weight == 1 + 2 + 6 + 0 + 2 + 1
    both = {"input_ids": IDS[:1], "document_ids": torch.zeros(1, 7, dtype=torch.int64), "attention_mask": MASK[:1]}
    torch.testing.assert_close(model(both)[0, :5], model(IDS[:1, :5])[0])


def test_a_sequence_of_padding_alone_is_finite(config, context):
    model = built(config, context).train()
    out = model({"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)})
    out.sum().backward()
    assert out.isfinite().all() and all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "shape"), [("tokens", (3, 7, 3)), ("sequences", (3, 3)), ("last", (3, 16)), ("mean", (3, 16))])
def test_outputs_and_parameters_of_heads(config, context, name, shape):
    config = replace(config, head=HEADS[name], tie_embeddings=True)  # which is about logits alone
    model = built(config, context)
    assert model(IDS).shape == shape
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    names = {name for name, _ in model.named_parameters() if name.startswith("head")}
    assert names == {"tokens": {"head.score.weight", "head.score.bias"}, "sequences": {"head.score.weight"}}.get(name, set())
    assert model.tied_parameters() == built(config, context, StageInfo(1, 2)).tied_parameters() == {}


def test_vectors_are_pooled_from_what_is_no_padding(config, context):
    """By the id of padding, by the mask, and all tokens without either."""
    hidden = {}
    probe = built(replace(config, head=HEADS["mean"]), context)
    probe.norm.register_forward_hook(lambda _, __, out: hidden.update(x=out.detach()))
    masked = {"input_ids": IDS, "attention_mask": MASK}
    torch.testing.assert_close(probe(masked)[0], hidden["x"][0, :5].mean(0))
    torch.testing.assert_close(probe(IDS), hidden["x"].mean(1))
    last = built(replace(config, head=replace(HEADS["last"], normalize=False)), context)
    torch.testing.assert_close(last(IDS), hidden["x"][torch.arange(3), [4, 6, 0]])
    unit = built(replace(config, head=HEADS["last"]), context)(IDS)
    torch.testing.assert_close(unit.norm(dim=-1), torch.ones(3))


def test_text_is_generated_by_language_models_alone(config, context):
    with pytest.raises(ConfigurationError, match=r"TokenClassification.*LanguageModeling"):
        generate(built(replace(config, head=HEADS["tokens"]), context), IDS, 1)
    moe = MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=8)
    assert generate(built(replace(config, moe=moe, qk_norm=True), context), IDS, 2).shape == (3, 9)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TokenClassification(num_labels=0), "num_labels=0"),
        (lambda: TokenClassification(num_labels=2, dropout=1.0), "dropout=1.0"),
        (lambda: SequenceClassification(num_labels=-1), "num_labels=-1"),
        (lambda: Embedding(pooling="first"), "pooling='first'.*'last' or 'mean'"),
    ],
)
def test_wrong_heads_are_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()
