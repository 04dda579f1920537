"""The catalogue on meshes: outputs, added losses and gradients are those of one process; biases of routers move alike."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.models.test_inputs_and_heads import HEADS
from tests.parallel.common import largest_difference, whole_gradients
from tests.support import quiet_trainer, sgd
from trainer_kit import AutoDataProvider, CausalLMTask
from trainer_kit.mesh import DistributedContext, MeshStrategy
from trainer_kit.models import Decoder, DecoderConfig, DecoderProvider, MoEConfig, RouterBias
from trainer_kit.parallel import parallelize_tensor
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import whole_tensor

SIZES = {
    "vocab_size": 11, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_size": 8, "head_size": 6, "intermediate_size": 12,
    "max_seq_len": 8, "init_std": 0.3, "qk_norm": True,
}  # fmt: skip
MOE = MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=6, dense_layers=(1,), aux_loss_coef=0.5, balance_bias=True)
IDS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(6) < torch.tensor([[6], [4], [1]])).long()
BATCH = {"input_ids": IDS, "attention_mask": MASK, "position_ids": torch.arange(2, 8)[None]}
MODELS = {
    "qwen3": DecoderConfig(**SIZES),
    "biases": DecoderConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_embeddings=True),
    "experts": DecoderConfig(**SIZES, moe=MOE),
    "experts alone": DecoderConfig(**SIZES, moe=MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=6)),
    **{name: DecoderConfig(**SIZES, head=head) for name, head in HEADS.items() if "bias" not in name},
}


def decoder(config, context):
    torch.manual_seed(0)
    model = Decoder(config, context=context).double()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def loss(model, context):
    """A sum over all outputs with different weights, and what routers add."""
    context.collect_losses()
    out = whole_tensor(model(BATCH))
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    added = context.take_losses()
    return (out * weights).sum() + sum(each.value * each.coefficient for each in added)


def compared(config):
    """The difference in the loss, and the largest relative one in gradients."""
    context = MeshStrategy(device="cpu", tp=2).build()
    try:
        alone = DistributedContext(MeshStrategy(), torch.device("cpu"))
        reference = decoder(config, alone)
        expected = loss(reference, alone)
        expected.backward()
        model, mesh = decoder(config, context), context.mesh_for("dense")["tp"]
        parallelize_tensor(model, mesh, model.tensor_plan(2))
        found = loss(model, context)
        found.backward()
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
        return abs(found - expected).item(), largest_difference(whole_gradients(model, mesh), wanted)
    finally:
        context.close()


@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_group_computes_what_one_process_does(name):
    """Contract 1, for norms of heads, experts on parts of the sequence, and heads that see all of it."""
    for in_loss, in_gradients in run_on_ranks(2, compared, MODELS[name]):
        assert in_loss < 1e-10 and in_gradients < 1e-9


class Samples(torch.utils.data.Dataset):
    """Sequences with different amounts of padding."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": (torch.arange(6) < 1 + index % 6).long()}


def trained(degrees, moe):
    """The biases of this rank's routers after three steps, and the losses if they are known here."""
    config = DecoderConfig(**(SIZES | {"num_layers": 3}), moe=moe)
    strategy = MeshStrategy(device="cpu", **degrees)
    data, task = AutoDataProvider(Samples(), 8, 4), CausalLMTask()
    callbacks = [RouterBias(0.01)] if moe.balance_bias else []
    trainer = quiet_trainer(
        DecoderProvider(config), task, data, callbacks=callbacks, strategy=strategy, optimizer=sgd(0.1), total_steps=3, log_every=1
    )
    trainer.fit()
    buffers = {name: buffer for stage in trainer.stages for name, buffer in stage.named_buffers()}
    values = {name: trainer.history.last(f"train/{name}") for name in ("loss", "load_balancing") if moe.aux_loss_coef}
    trainer.close()
    return {name: buffer.tolist() for name, buffer in buffers.items() if name.endswith("balance_bias")}, values


@pytest.mark.parametrize("degrees", [{"dp_replicate": 2}, {"dp_shard": 2, "ep": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_biases_follow_the_load_of_all_ranks(degrees):
    """Those of every rank are those of one process, tensor peers and padding included."""
    moe = replace(MOE, aux_loss_coef=0.0)
    ((expected, _),) = run_on_ranks(1, trained, {}, moe)
    assert len(expected) == 2 and all(any(bias) for bias in expected.values())
    found = [biases for biases, _ in run_on_ranks(2, trained, degrees, moe)]
    assert {name for biases in found for name in biases} == set(expected)
    assert all(bias == expected[name] for biases in found for name, bias in biases.items())


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 2, "ep": 2}, {"pp": 2}], ids=str)
def test_the_auxiliary_loss_is_that_of_one_process(degrees):
    """On ranks that share the same microbatches; the loss of a microbatch is no sum over its samples."""
    ((_, expected),) = run_on_ranks(1, trained, {}, MOE)
    for _, found in run_on_ranks(2, trained, degrees, MOE):
        for name, (step, value) in expected.items():
            assert found[name] == (step, pytest.approx(value, rel=1e-5)), name
