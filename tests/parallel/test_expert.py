"""`parallelize_expert`, and what `default_plan` makes of a model with experts: contracts, units, gradients, files, refusals."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.parallel.common import SIZES, CountCollectives, decoder, largest_difference, make_mesh, token_loss, tokens
from tests.support import quiet_trainer, sgd
from trainer_kit import AutoDataProvider, CausalLMTask, Trainer
from trainer_kit.exceptions import ConfigurationError, ModelError, UnsupportedError
from trainer_kit.mesh import MeshStrategy
from trainer_kit.mesh.contracts import contracts_of
from trainer_kit.mesh.layout import layout_of
from trainer_kit.model import StageContext, StageInfo
from trainer_kit.models import DecoderConfig, DecoderProvider, MoEConfig
from trainer_kit.models.experts import MixtureOfExperts
from trainer_kit.parallel import FSDPSync, default_plan, fsdp_units, parallelize_expert, parallelize_replicate, parallelize_tensor
from trainer_kit.parameters import ParameterTable
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import whole_tensor

MOE = MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=6, dense_layers=(1,))
CONFIG = DecoderConfig(**SIZES, moe=MOE)


def planned(degrees):
    """A decoder with experts after the plan, its context, and the gradients of one process for the samples of all data ranks."""
    context = MeshStrategy(device="cpu", **{"dp_replicate": 1, **degrees}).build()
    model = decoder(moe=MOE)
    for rank in range(context.num_data_ranks):
        token_loss(model, tokens(rank)).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    default_plan(StageContext(context, StageInfo(), model))
    ParameterTable([model]).check_contracts(context.dense_sizes())
    return model, context, expected


def summed(model, context):
    """Name -> the whole gradient over all ranks: what the synchroniser does, by hand."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole_tensor(parameter.grad.detach()).clone()
        for dim, (kind, size) in contracts_of(parameter).items():
            if kind == "partial" and size > 1:
                torch.distributed.all_reduce(found[name], group=context.group(context.domain_with((dim,)), dim))
    return found


def plan_job(degrees):
    model, context, expected = planned(degrees)
    try:
        token_loss(model, tokens(context.data_rank)).backward()
        experts = model.layers["0"].feed_forward.experts
        layout, names = layout_of(experts.gate_proj), {part: name for name, part in model.named_modules()}
        kinds = {dim: contract.kind for dim, contract in contracts_of(experts.gate_proj).items() if contract.size > 1}
        units = [names[unit] for unit in fsdp_units(model)]
        return kinds, (layout.offsets[0], layout.sizes[0]), units, largest_difference(summed(model, context), expected)
    finally:
        context.close()


DENSE, EXPERTS = ["", "layers.0", "layers.1"], "layers.0.feed_forward.experts"
BOTH = ["", "layers.0", EXPERTS, "layers.1"]
TWO, FOUR = [(0, 2), (2, 2)], [(0, 1), (1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize(
    ("degrees", "kinds", "boxes", "units"),
    [
        ({"dp_replicate": 2, "ep": 2}, {"ep": "complete"}, TWO, []),
        ({"dp_shard": 2, "ep": 2}, {"ep": "complete"}, TWO, DENSE),
        ({"tp": 2, "ep": 2}, {"ep": "complete"}, TWO, []),
        ({"dp_shard": 4, "ep": 4}, {"ep": "complete"}, FOUR, DENSE),
        ({"dp_shard": 4, "ep": 2}, {"ep_shard": "fsdp", "ep": "complete"}, [(0, 1), (2, 1), (1, 1), (3, 1)], BOTH),
        ({"dp_replicate": 4, "ep": 2}, {"ep_shard": "fsdp", "ep": "complete"}, [(0, 1), (2, 1), (1, 1), (3, 1)], [EXPERTS]),
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {"ep_replicate": "partial", "ep": "complete"}, TWO * 2, DENSE),
        ({"tp": 2, "dp_shard": 2, "ep": 4}, {"ep": "complete"}, FOUR, DENSE),
    ],
    ids=str,
)
def test_the_plan_of_each_mesh(degrees, kinds, boxes, units):
    """Contracts 1 and 9, B119: contracts along the expert domain, experts as units of their own, gradients those of one process."""
    found = run_on_ranks(len(boxes), plan_job, degrees)
    assert [(each[0], each[1], each[2]) for each in found] == [(kinds, box, units) for box in boxes]
    assert max(difference for *_, difference in found) < 1e-12


def uneven_job():
    model, context, expected = planned({"dp_shard": 8, "ep": 4})
    try:
        token_loss(model, tokens(context.data_rank)).backward()
        return model.layers["0"].feed_forward.experts.gate_proj.to_local().shape[0], largest_difference(summed(model, context), expected)
    finally:
        context.close()


def test_ranks_without_a_shard_of_experts():
    """Contract 14: one expert for two ranks of `ep_shard`."""
    found = run_on_ranks(8, uneven_job)
    assert [rows for rows, _ in found] == [1] * 4 + [0] * 4 and max(difference for _, difference in found) < 1e-12


def pack_job():
    """The collectives of a pack of three microbatches, two of the dense units and one of experts."""
    model, context, _ = planned({"dp_shard": 4, "ep": 2})
    try:
        sync = FSDPSync(fsdp_units(model), "pack")
        with CountCollectives() as count:
            for number in range(3):
                sync.begin_microbatch(number == 2)
                token_loss(model, tokens(number)).backward()
        return dict(count.calls)
    finally:
        context.close()


def test_units_of_experts_gather_and_reduce_once_per_pack():
    """Contract 44b: root, two blocks, and the experts of one of them."""
    assert run_on_ranks(4, pack_job) == [{"all_gather": 4, "reduce_scatter": 4}] * 4


class Doubled:
    """A dispatch backend of a user, which shows what it was told."""

    def __init__(self, group, num_experts):
        self.told = (group.size(), num_experts)

    def __call__(self, x_ND, routing, experts):
        return 2 * x_ND


def layer(num_experts=4):
    return MixtureOfExperts(DecoderConfig(**SIZES, moe=replace(MOE, num_experts=num_experts)), 0.02)


def interface_job():
    mesh = make_mesh(ep_replicate=1, ep_shard=1, ep=2)
    mixture, x = layer(), torch.ones(1, 3, 8)
    parallelize_expert(mixture, mesh, backend=Doubled)
    assert mixture.dispatch.told == (2, 4) and torch.equal(mixture(x), 2 * x)
    with pytest.raises(ModelError, match=r"'gate_proj' of GroupedExperts is distributed already; call parallelize_expert once"):
        parallelize_expert(mixture, mesh)
    with pytest.raises(ConfigurationError, match=r"ep=2 of MeshStrategy does not divide the num_experts=3 of GroupedExperts"):
        parallelize_expert(layer(3), mesh)
    with pytest.raises(ConfigurationError, match=r'expected ep_replicate, ep_shard, ep; take that .* domain, ctx.mesh\("expert"\)'):
        parallelize_expert(layer(), make_mesh(tp=2))
    odd = layer()
    odd.experts.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ModelError, match=r"one number of experts along dim 0, found the shapes \[\(3,\), "):
        parallelize_expert(odd, mesh)
    whole = nn.ModuleDict({"layer": layer(), "other": nn.Linear(2, 2)})
    parallelize_tensor(whole, make_mesh(tp=2), {"other": "column"})
    with pytest.raises(UnsupportedError, match=r'see the same tokens in GroupedExperts.*name its layer "sequence"'):
        parallelize_expert(whole["layer"], mesh)
    kept = layer()
    parallelize_expert(kept, mesh)
    parallelize_replicate(kept, make_mesh(dp_replicate=2))
    assert "dp_replicate" in contracts_of(kept.router.weight) and "dp_replicate" not in contracts_of(kept.experts.up_proj)


def test_the_interface_of_backends_and_what_is_refused():
    """Other functions leave what was shared out alone."""
    run_on_ranks(2, interface_job)


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"input_ids": torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(index))}


def make(degrees, config=CONFIG, **settings) -> Trainer:
    strategy = MeshStrategy(device="cpu", **{"dp_replicate": 1, **degrees})
    data = AutoDataProvider(Sequences(), 4, 1)
    return quiet_trainer(
        DecoderProvider(config), CausalLMTask(), data, strategy=strategy, optimizer=sgd(0.5), total_steps=3, log_every=1, **settings
    )


def fit_job(degrees, folder, settings):
    """The losses, that of an evaluation on 5 samples, and the digests of the exported files before and after."""
    trainer = make(degrees, **settings)
    try:
        for name in ("initial", "final"):
            if name == "final":
                trainer.fit()
            trainer.export(f"{folder}/{name}")
        values = trainer.evaluate(AutoDataProvider(torch.utils.data.Subset(Sequences(), range(5)), 4, 1))
        files = sorted(Path(folder).rglob("*.safetensors")) if trainer.context.is_main else []
        digests = {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        return [value for _, value in trainer.history.values("train/loss")], values["val/loss"], digests
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("degrees", "settings"),
    [({"dp_shard": 2, "ep": 2}, {"activation_checkpointing": True}), ({"dp_shard": 4, "ep": 2, "fsdp_sync": "pack"}, {})],
    ids=str,
)
def test_runs_and_files_do_not_depend_on_the_mesh(degrees, settings, tmp_path):
    """Contract 11 and B98: initial files bitwise equal; recomputation, and an evaluation in which one rank has a sample more."""
    ((losses, evaluated, files),) = run_on_ranks(1, fit_job, {}, str(tmp_path / "one"), {})
    found = run_on_ranks(degrees["dp_shard"], fit_job, degrees, str(tmp_path / "mesh"), settings)
    for other_losses, other_evaluated, _ in found:
        assert other_losses == pytest.approx(losses, rel=1e-5) and other_evaluated == pytest.approx(evaluated, rel=1e-5)
    assert found[0][2].keys() == files.keys()
    assert {name: digest for name, digest in found[0][2].items() if "initial" in name} == {n: d for n, d in files.items() if "initial" in n}


def without_experts_job(config, degrees):
    trainer = make(degrees, config)
    try:
        trainer.fit()
    finally:
        trainer.close()


@pytest.mark.parametrize("degrees", [{"dp_replicate": 2, "ep": 2}, {"pp": 2, "dp_replicate": 2, "ep": 2}], ids=str)
def test_a_model_without_experts_has_no_use_for_ep(degrees):
    """Contract 45, before the first step."""
    num_ranks = 2 * degrees.get("pp", 1)
    with pytest.raises(Exception, match=r"ep=2 of MeshStrategy has no effect: Decoder has no experts that are shared out"):
        run_on_ranks(num_ranks, without_experts_job, replace(CONFIG, moe=None), degrees)
    with pytest.raises(Exception, match=r"ep=2 of MeshStrategy does not divide the num_experts=3"):
        run_on_ranks(num_ranks, without_experts_job, replace(CONFIG, moe=replace(MOE, num_experts=3)), degrees)
