"""Adapters of grouped experts against the products written out, and their merged export."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.peft.common import CONFIG, stack, tensors, tokens, trainer
from trainer_kit import peft
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.models import Decoder, MoEConfig
from trainer_kit.models.experts import GroupedExperts
from trainer_kit.peft.inject import find_matches
from trainer_kit.testing import run_on_ranks

MOE = MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=8)
MIXED = dataclasses.replace(CONFIG, moe=MOE, num_layers=1)


def mixed(stage=None):
    return Decoder(MIXED, stage)


def test_each_expert_adds_its_own_product():
    """Issue 5: LoRA for grouped linear layers; an expert without tokens has a gradient too."""
    experts = GroupedExperts(6, MOE, 0.3, 0.3).double()
    model = nn.ModuleDict({"experts": experts})
    find_matches(model, [peft.LoRA(2, 6, targets=["experts"])]).apply()
    for matrix in experts.lora.parameters():
        nn.init.normal_(matrix)
    x, ends = torch.randn(5, 6, dtype=torch.float64), torch.tensor([2, 2, 4, 5])
    weights = {name: getattr(experts, name) + 3 * adapter.B @ adapter.A for name, adapter in experts.lora.items()}
    rows = []
    for row, expert in zip(x, [0, 0, 2, 2, 3], strict=True):
        gate, up, down = (weights[name][expert] for name in ("gate_proj", "up_proj", "down_proj"))
        rows.append(F.linear(F.silu(F.linear(row, gate)) * F.linear(row, up), down))
    found = experts(x, ends)
    torch.testing.assert_close(found, torch.stack(rows))
    found.sum().backward()
    assert all(matrix.grad is not None for matrix in experts.lora.parameters())


def test_the_first_values_are_those_of_a_linear_layer_per_expert():
    experts = GroupedExperts(100, MOE, 0.3, 0.3)
    find_matches(nn.ModuleDict({"experts": experts}), [peft.LoRA(8, targets=["*.up_proj"])]).apply()
    assert list(experts.lora) == ["up_proj"]
    bound = 100**-0.5
    assert 0.99 * bound < experts.lora["up_proj"].A.abs().max() <= bound
    assert experts.lora["up_proj"].B.count_nonzero() == 0


def test_adapted_experts_train_merge_and_export(tmp_path):
    run = trainer(stack(peft.LoRA(2, 4, targets=["*.experts", "*.q_proj"]), base=mixed))
    run.fit()
    run.export(tmp_path)
    model = run.model.eval()
    base = mixed()
    base.load_state_dict(tensors(tmp_path))
    with torch.no_grad():
        expected = model(tokens())
        torch.testing.assert_close(base.eval()(tokens()), expected)
        with peft.merged(model):
            torch.testing.assert_close(model(tokens()), expected)
        assert torch.equal(model(tokens()), expected)


def test_a_weight_of_experts_has_one_adapter():
    with pytest.raises(ConfigurationError, match=r"experts\.up_proj' is matched by a second LoRA"):
        trainer(stack(peft.LoRA(2, targets="*.up_proj"), peft.LoRA(2, targets="*.experts"), base=mixed)).build()


def job_export(degrees, folder):
    run = trainer(stack(peft.LoRA(2, 4, targets=["*.experts", "*.q_proj"]), base=mixed), degrees)
    run.fit()
    run.export(folder)
    run.close()


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"tp": 2}])
def test_adapted_experts_on_a_mesh_are_those_of_one_process(tmp_path, degrees):
    """FSDP cuts adapters along the experts; with tp each rank computes its part of the sequence."""
    job_export(None, tmp_path / "one")
    run_on_ranks(2, job_export, degrees, str(tmp_path / "mesh"))
    found, expected = tensors(tmp_path / "mesh"), tensors(tmp_path / "one")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
