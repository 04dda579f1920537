"""The decoder: shapes, causality, rotary positions, grouped queries, ties, counts and generation."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from trainer_kit import CausalLMTask
from trainer_kit.exceptions import ConfigurationError, ModelError
from trainer_kit.mesh import DistributedContext, MeshStrategy
from trainer_kit.model import ModelCaller, StageInfo, build_stage
from trainer_kit.models import Decoder, DecoderConfig, generate, num_flops_per_token
from trainer_kit.models.layers import Attention, RotaryTable

CONFIG = DecoderConfig(vocab_size=11, num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=16, intermediate_size=24, max_seq_len=12)
CONTEXT = DistributedContext(MeshStrategy(), torch.device("cpu"))
IDS = torch.tensor([[1, 5, 2, 9, 4, 0, 3], [7, 7, 1, 2, 10, 6, 8]])


def build(config=CONFIG, **options):
    return build_stage(lambda: Decoder(config), CONTEXT, seed=0, **options)


def test_logits_have_the_shape_of_the_ids_and_the_vocabulary():
    """The stage form, alone or as what `CausalLMTask` makes of a mapping."""
    model = build()
    for batch in (IDS, {"input_ids": IDS, "labels": IDS}):
        given = CausalLMTask().build_forward_inputs(batch)
        assert ModelCaller(model)(given.inputs, given.shared).shape == (2, 7, 11)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((IDS,), r"in a tuple, expected token ids \(batch, length\)"),
        (IDS[0], r"of shape \(7,\)"),
        ({"input_ids": IDS, "pixels": IDS}, r"\['input_ids', 'pixels'\], expected token ids"),
        ({"attention_mask": IDS}, r"\['attention_mask'\], expected token ids"),
        ({"input_ids": IDS, "attention_mask": IDS[:, None, None]}, r"attention_mask of shape \(2, 1, 1, 7\).*of shape \(2, 7\)"),
        ({"input_ids": IDS, "attention_mask": IDS.float()}, r"attention_mask of .*float32, expected whole numbers"),
        ({"input_ids": IDS, "position_ids": IDS[:, :3]}, r"position_ids of shape \(2, 3\).*below max_seq_len=12"),
    ],
)
def test_inputs_of_another_kind_are_refused(inputs, words):
    """What is not known would be left out silently."""
    with pytest.raises(ModelError, match=words):
        ModelCaller(build())(inputs)


def test_a_later_token_changes_no_earlier_logits():
    model, changed = build(), IDS.clone()
    changed[:, 4] = 5
    before, after = model(IDS), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_rotary_positions_are_complex_rotations():
    """Su et al. 2021: the pair (e, e + E/2) as a complex number, times exp(i * t * theta^(-2e/E))."""
    table = RotaryTable(8, 6, theta=100.0)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float()
    as_complex = torch.complex(x[..., :4].double(), x[..., 4:].double())
    angles = [[t * 100.0 ** (-2 * e / 8) for e in range(4)] for t in range(5)]
    turned = as_complex * torch.polar(torch.ones(5, 4, dtype=torch.float64), torch.tensor(angles, dtype=torch.float64))[:, None]
    torch.testing.assert_close(table(x), torch.cat((turned.real, turned.imag), -1).float())


def test_rotary_scores_depend_on_the_distance_alone():
    table = RotaryTable(8, 10, theta=10_000.0)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    scores = table(q.expand(1, 10, 1, 8)).squeeze() @ table(k.expand(1, 10, 1, 8)).squeeze().T
    for distance in range(-9, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_rotary_tables_stay_float32_in_a_bf16_model():
    """B92."""
    model = build(dtype=torch.bfloat16)
    assert model.rotary.cos_TE.dtype == torch.float32
    assert model.rotary.cos_TE[3, 1].item() == pytest.approx(math.cos(3 * 10_000**-0.5), rel=1e-6)
    assert model(IDS).dtype == torch.bfloat16
    assert not [name for name in model.state_dict() if name.startswith("rotary")]


def test_grouped_queries_are_repeated_heads():
    config = replace(CONFIG, num_kv_heads=4)
    grouped, full = Attention(CONFIG, 0.02), Attention(config, 0.02)
    state = grouped.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):  # head k serves the query heads 2k and 2k + 1
        state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    table = RotaryTable(4, 12, 10_000.0)
    torch.testing.assert_close(grouped(x, table), full(x, table))


def test_attention_is_softmax_of_scaled_scores():
    config = replace(CONFIG, num_kv_heads=4)
    attention, table = Attention(config, 0.02), RotaryTable(4, 12, 10_000.0)
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = (F.linear(x, p.weight).view(5, 4, 4) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    q, k = table(q[None])[0], table(k[None])[0]
    heads = []
    for head in range(4):
        scores = q[:, head] @ k[:, head].T / 2.0
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[:, head])
    torch.testing.assert_close(attention(x, table)[0], F.linear(torch.cat(heads, -1), attention.o_proj.weight), rtol=1e-4, atol=1e-7)


def test_tied_embeddings_are_tied_after_the_build():
    """Contract 12."""
    tied = build(replace(CONFIG, tie_embeddings=True))
    assert tied.head.weight is tied.embedding.weight
    assert torch.equal(tied.embedding.weight, build().embedding.weight)


def test_projections_into_the_residual_stream_start_smaller():
    config = replace(CONFIG, num_layers=8, hidden_size=64, head_size=16, num_kv_heads=4)
    model = build(config)
    layer = model.layers["5"]
    for projection in (layer.attention.o_proj, layer.feed_forward.down_proj):
        assert projection.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert layer.attention.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    loss = F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())
    assert loss.item() == pytest.approx(math.log(11), rel=0.02)


def test_dropout_is_active_in_training_only():
    model = build(replace(CONFIG, dropout=0.5))
    assert not torch.equal(model(IDS), model(IDS))
    model.eval()
    assert torch.equal(model(IDS), model(IDS))


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"num_kv_heads": 4}, {"intermediate_size": 0}])
def test_the_number_of_parameters_is_that_of_the_model(changes):
    config = replace(CONFIG, **changes)
    assert config.num_parameters == sum(p.numel() for p in Decoder(config).parameters())


def test_the_small_preset_has_ten_million_parameters():
    assert DecoderConfig.small().num_parameters == pytest.approx(10e6, rel=0.1)


def test_flops_per_token_are_three_times_the_counted_forward():
    """Against torch's counter: attention in full, the backward as two forwards."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = replace(CONFIG, num_kv_heads=4, max_seq_len=8)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the others are not counted on CPU
        Decoder(config)(torch.zeros(1, 8, dtype=torch.int64))
    norms = (2 * config.num_layers + 1) * config.hidden_size  # are in N, but are no matrix products
    assert num_flops_per_token(config, 8) == 3 * counter.get_total_flops() / 8 + 6 * norms
    tied = replace(config, tie_embeddings=True)
    assert num_flops_per_token(tied, 8) == num_flops_per_token(config, 8)


def parts_of(config, num_stages):
    return [build_stage(lambda stage: Decoder(config, stage), CONTEXT, StageInfo(index, num_stages), seed=0) for index in range(num_stages)]


@pytest.mark.parametrize("inputs", [IDS, {"input_ids": IDS}])
def test_stages_hold_their_layers_under_global_names(inputs):
    """Contract 11: initial values are those of the whole model, and so are the logits. What goes on is what `stage_transfer_spec` says."""
    config = replace(CONFIG, num_layers=5)
    whole = build_stage(lambda stage: Decoder(config, stage), CONTEXT, seed=0)
    parts = parts_of(config, 3)
    found = {name: value for part in parts for name, value in part.state_dict().items()}
    assert sum(len(part.state_dict()) for part in parts) == len(found)
    assert found.keys() == whole.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in whole.state_dict().items())
    x = inputs
    for index, part in enumerate(parts):
        x = part(x, None)
        for boundary, other in (("outgoing", index), ("incoming", index + 1)) if index < 2 else ():
            spec = parts[other].stage_transfer_spec(inputs, boundary)
            assert spec.is_meta and (spec.shape, spec.dtype) == (x.shape, x.dtype)
    torch.testing.assert_close(x, whole(IDS))


def test_stages_of_another_precision_say_so():
    parts = [
        build_stage(lambda stage: Decoder(CONFIG, stage), CONTEXT, StageInfo(index, 2), seed=0, dtype=torch.bfloat16) for index in (0, 1)
    ]
    assert parts[0](IDS).dtype == parts[1].stage_transfer_spec(IDS, "incoming").dtype == torch.bfloat16


def test_tied_embeddings_of_stages_are_declared():
    """Contract 12: the head is a weight of its own on the last stage, with the name of the first one's."""
    config = replace(CONFIG, tie_embeddings=True)
    first, middle, last = parts_of(replace(config, num_layers=3), 3)
    assert first.tied_parameters() == middle.tied_parameters() == {} and last.tied_parameters() == {"head.weight": "embedding.weight"}
    assert last.head.weight.shape == first.embedding.weight.shape
    assert build(config).tied_parameters() == {}, "in one stage it is one parameter"
    assert parts_of(CONFIG, 2)[1].tied_parameters() == {}


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigurationError, match="num_layers=2 cannot be cut into num_stages=3"):
        Decoder(CONFIG, StageInfo(0, 3))


def test_a_sequence_that_is_too_long_is_refused():
    with pytest.raises(ModelError, match=r"13 tokens.*max_seq_len=12"):
        build()(torch.zeros(1, 13, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 18, "head_size": 0}, "hidden_size=18.*num_heads=4"),
        ({"hidden_size": 12, "head_size": 0}, "hidden_size=12.*even"),
        ({"head_size": 5}, "head_size=5.*even"),
        ({"num_kv_heads": 3}, "num_kv_heads=3.*num_heads=4"),
        ({"num_kv_heads": -2}, "num_kv_heads=-2"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"max_seq_len": 0}, "max_seq_len=0"),
        ({"intermediate_size": -1}, "intermediate_size=-1"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"rope_theta": 1.0}, "rope_theta=1.0"),
        ({"init_std": 0.0}, "init_std=0.0"),
        ({"head": "classification"}, "head='classification'.*LanguageModeling"),
        ({"moe": 8}, "moe=8.*MoEConfig"),
    ],
)
def test_wrong_sizes_are_refused(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        replace(CONFIG, **changes)


def test_defaults_of_the_sizes():
    config = DecoderConfig(vocab_size=5, num_layers=1, num_heads=2, hidden_size=96)
    assert (config.num_kv_heads, config.intermediate_size, config.head_size) == (2, 256, 48)


class Counting(Decoder):
    """Always expects the next number, and remembers the length of what it saw."""

    def __init__(self):
        super().__init__(CONFIG)
        self.lengths = []

    def forward(self, input_ids):
        self.lengths.append(input_ids.shape[1])
        return F.one_hot((input_ids + 1) % 11, 11).float() * 9 + F.one_hot((input_ids + 2) % 11, 11) * 8


def test_generate_continues_within_the_window_and_restores_modes():
    model = Counting()
    model.train()
    model.layers["0"].eval()
    tokens = generate(model, torch.tensor([[1], [9]]), 14, temperature=0)
    assert tokens.tolist() == [[(1 + i) % 11 for i in range(15)], [(9 + i) % 11 for i in range(15)]]
    assert model.lengths == [*range(1, 13), 12, 12]
    assert model.training
    assert not model.layers["0"].training


def test_sampling_follows_temperature_and_top_k():
    model, start = Counting(), torch.zeros(4000, 1, dtype=torch.int64)

    def sample(**options):
        return generate(model, start, 1, generator=torch.Generator().manual_seed(0), **options)[:, 1]

    assert set(sample(top_k=1).tolist()) == {1}
    two = sample(top_k=2, temperature=2.0)
    assert set(two.tolist()) == {1, 2}
    assert two.eq(1).double().mean().item() == pytest.approx(1 / (1 + math.exp(-0.5)), abs=0.03)
    assert torch.equal(two, sample(top_k=2, temperature=2.0))


@pytest.mark.parametrize("arguments", [{"temperature": -1.0}, {"top_k": 0}])
def test_generate_refuses_wrong_options(arguments):
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        generate(build(), IDS, 1, **arguments)
    with pytest.raises(ConfigurationError, match="length >= 1"):
        generate(build(), torch.zeros(1, 0, dtype=torch.int64), 1)
