"""Stretched rotary positions, against the functions of transformers, and against closed forms."""

import math
from dataclasses import replace

import pytest
import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.model import build_stage
from trainer_kit.models import Decoder, LinearScaling, Llama3Scaling, NTKScaling, YaRNScaling
from trainer_kit.models.rotary import RotaryTable
from trainer_kit.models.rotary_scaling import frequencies

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
LLAMA = {
    "rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("scaling", "parameters", "seq_len"),
    [
        (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}, None),
        (NTKScaling(7.0), {"rope_type": "dynamic", "factor": 4.0}, 81920),  # 2.5 times the length: by 4 * 2.5 - (4 - 1) = 7
        (NTKScaling(1.0), {"rope_type": "dynamic", "factor": 4.0}, None),
        (Llama3Scaling(32.0, 8192), LLAMA, None),
        (YaRNScaling(8.0, 4096), YARN, None),
        (YaRNScaling(8.0, 4096, 16.0, 2.0, truncate=False), YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False}, None),
        (YaRNScaling(8.0, 4096, attention_factor=1.5), YARN | {"attention_factor": 1.5}, None),
        (YaRNScaling(8.0, 4096, mscale=0.7, mscale_all_dim=1.2), YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}, None),
    ],
)
@pytest.mark.parametrize(("head_size", "theta"), [(64, 10_000.0), (128, 500_000.0)])
def test_frequencies_are_those_of_transformers(scaling, parameters, seq_len, head_size, theta):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=head_size, max_position_embeddings=32768, rope_parameters=parameters | {"rope_theta": theta})
    expected, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)
    torch.testing.assert_close(scaling.frequencies(head_size, theta).float(), expected, rtol=1e-5, atol=0)
    assert scaling.attention_scale == pytest.approx(scale, rel=1e-12)


def test_the_ends_of_each_scaling():
    """The fastest pair is left alone but by position interpolation; the slowest is slowed by the whole factor."""
    plain = frequencies(64, 10_000.0)
    for scaling, first in ((LinearScaling(4.0), 4), (NTKScaling(4.0), 1), (Llama3Scaling(4.0, 8192), 1), (YaRNScaling(4.0, 8192), 1)):
        ratio = plain / scaling.frequencies(64, 10_000.0)
        assert (ratio[0].item(), ratio[-1].item()) == pytest.approx((first, 4)), scaling
        assert bool((ratio.diff() >= -1e-12).all()), scaling
    assert YaRNScaling(4.0, 8192).attention_scale == pytest.approx(0.1 * math.log(4) + 1)


def test_the_table_is_scaled_and_turned_by_the_positions_given():
    table = RotaryTable(8, 16, 100.0, YaRNScaling(4.0, 8))
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    scale = YaRNScaling(4.0, 8).attention_scale
    torch.testing.assert_close(table(x).norm(dim=-1), scale * x.norm(dim=-1))
    positions = torch.tensor([[3, 4, 5, 6, 7], [0, 1, 2, 0, 1]])
    turned = table(x, positions)
    for row in range(2):
        for place, position in enumerate(positions[row]):
            at = torch.zeros(1, 16, 3, 8)
            at[:, position] = x[row, place]
            assert torch.equal(turned[row, place], table(at)[0, position])


def test_a_built_model_has_the_table_of_its_scaling(config, context):
    """B92: computed on the real device, in float32, whatever the dtype of the weights."""
    scaling = LinearScaling(2.0)
    model = build_stage(lambda: Decoder(replace(config, rope_scaling=scaling)), context, seed=0, dtype=torch.bfloat16)
    assert torch.equal(model.rotary.cos_TE, RotaryTable(config.head_size, config.max_seq_len, config.rope_theta, scaling).cos_TE)
    assert model.rotary.cos_TE[4, 1].item() == pytest.approx(math.cos(2 * 10_000**-0.5), rel=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LinearScaling(0.5), "factor=0.5"),
        (lambda: NTKScaling(0.0), "factor=0.0"),
        (lambda: YaRNScaling(2.0, 0), "original_max_seq_len=0"),
        (lambda: YaRNScaling(2.0, 8, beta_fast=1.0, beta_slow=2.0), "beta_fast=1.0.*beta_slow=2.0"),
        (lambda: Llama3Scaling(2.0, 8, 4.0, 4.0), "high_freq_factor=4.0.*low_freq_factor=4.0"),
    ],
)
def test_wrong_scalings_are_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()
