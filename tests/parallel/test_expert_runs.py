"""Runs with shared-out experts and what else a run may have: adapters of experts, and other precisions."""

import pytest
import torch
from safetensors.torch import load_file

from tests.peft.common import assert_bitwise
from tests.ranks.support import on_mesh
from tests.support import quiet_trainer, sgd
from trainer_kit import AutoDataProvider, CausalLMTask, peft
from trainer_kit.models import Decoder, DecoderConfig, MoEConfig
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import whole_tensor

CONFIG = DecoderConfig(
    vocab_size=13, num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=16, intermediate_size=24, max_seq_len=8, init_std=0.2,
    moe=MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=8),
)  # fmt: skip
LORA = peft.LoRA(2, 8, targets=["*.experts.*", "*.q_proj"])


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.randint(CONFIG.vocab_size, (6,), generator=torch.Generator().manual_seed(index))


def decoder(stage=None):
    return Decoder(CONFIG, stage)


def make(degrees, model, settings):
    data = AutoDataProvider(Tokens(), global_batch_size=8, microbatch_size=2)
    settings = {"total_steps": 3, "optimizer": sgd(0.5), "log_every": 1, **settings}
    if degrees is None:
        return quiet_trainer(model, CausalLMTask(), data, **settings)
    return on_mesh(model, CausalLMTask(), data, degrees, **settings)


def adapters_job(degrees, folder):
    """First values of adapters, an export after three steps, and what a live merge makes of the experts of this rank, with their boxes."""
    trainer = make(degrees, peft.adapt(decoder, LORA), {})
    try:
        trainer.build()
        initial = {row.name: whole_tensor(row.parameter.detach()).clone() for row in trainer.parameters.trainable()}
        trainer.fit()
        trainer.export(folder)
        for stage in trainer.stages:
            peft.merge(stage)
        rows = [row for row in trainer.parameters if row.name.endswith(("gate_proj", "up_proj", "down_proj"))]
        return initial, {row.name: (row.local.detach().clone(), row.layout.box) for row in rows}
    finally:
        trainer.close()


@pytest.mark.parametrize("degrees", [{"dp_shard": 2, "ep": 2}, {"dp_shard": 4, "ep": 2}], ids=str)
def test_adapters_of_experts_are_shared_out_with_them(degrees, tmp_path):
    """Contracts 11 and 13: first values bitwise, merged files after training to rounding, and the same by a live merge of the parts."""
    ((expected, _),) = run_on_ranks(1, adapters_job, None, str(tmp_path / "one"))
    found = run_on_ranks(degrees["dp_shard"], adapters_job, degrees, str(tmp_path / "mesh"))
    one, mesh = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "mesh"))
    assert one.keys() == mesh.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(mesh[name], tensor, rtol=1e-4, atol=1e-5)
    for initial, merged in found:
        assert_bitwise(initial, expected)
        assert len(merged) == 6
        for name, (local, box) in merged.items():
            torch.testing.assert_close(local, mesh[name][box], rtol=1e-5, atol=1e-6)


def losses_job(degrees, settings):
    """The losses of three steps."""
    trainer = make(degrees, decoder, settings)
    try:
        trainer.fit()
        return [value for _, value in trainer.history.values("train/loss")]
    finally:
        trainer.close()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_precisions(precision):
    """As on one process, to what bfloat16 holds."""
    (expected,) = run_on_ranks(1, losses_job, None, {"precision": precision})
    for found in run_on_ranks(4, losses_job, {"dp_shard": 4, "ep": 2}, {"precision": precision}):
        assert found == pytest.approx(expected, rel=0.02)
