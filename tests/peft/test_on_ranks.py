"""Adapted models on a mesh against one process: initial values, training, files, merging, and where patterns match on one stage only."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from tests.parallel.common import decoder as double_decoder
from tests.parallel.common import gradients, largest_difference, make_mesh, token_loss, whole_gradients
from tests.parallel.common import tokens as double_tokens
from tests.peft.common import CONFIG, assert_bitwise, decoder, stack, tensors, trainer
from tests.ranks.support import on_mesh
from tests.support import sgd
from trainer_kit import AutoDataProvider, SupervisedTask, peft
from trainer_kit.models import Decoder
from trainer_kit.parallel import parallelize_fsdp, parallelize_tensor
from trainer_kit.peft.inject import find_matches
from trainer_kit.testing import run_on_ranks

MESHES = {"fsdp": {"dp_shard": 2}, "tp": {"tp": 2}, "stages": {"pp": 2}}


def job_run(degrees, folder, base):
    """Files before and after training; what a live merge makes of the part of this rank, and which part that is."""
    run = trainer(stack(base=Decoder(CONFIG) if base == "module" else decoder), degrees, source_model=None if base else f"{folder}/base")
    peft.export_adapters(run, f"{folder}/initial")
    run.fit()
    run.export(f"{folder}/merged")
    peft.export_adapters(run, f"{folder}/adapters")
    before = {row.name: row.local.detach().clone() for row in run.parameters}
    loss = run.evaluate(run.data)["val/loss"]
    for stage in run.stages:
        peft.merge(stage)
    merged = {row.name: row.local.detach().clone() for row in run.parameters}
    assert run.evaluate(run.data)["val/loss"] == pytest.approx(loss, rel=1e-5)
    for stage in run.stages:
        peft.unmerge(stage)
    assert_bitwise({row.name: row.local.detach() for row in run.parameters}, before)
    assert run.evaluate(run.data)["val/loss"] == loss
    boxes = {row.name: row.layout.box for row in run.parameters}
    run.close()
    return merged, boxes


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The files of one process."""
    folder = tmp_path_factory.mktemp("one")
    base = trainer(decoder, seed=5)
    base.export(folder / "base")
    job_run(None, folder, "")
    return folder


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_gives_the_files_of_one_process(expected, tmp_path, mesh):
    """Contract 11: first values are bitwise the same. Contract 13: what is frozen is bitwise that of the source model.

    Training agrees to the rounding of sums, and a live merge to that of products, with the merged export of the same run.
    """
    (tmp_path / "base").symlink_to(expected / "base")
    found = run_on_ranks(2, job_run, MESHES[mesh], str(tmp_path), "")
    assert_bitwise(tensors(tmp_path / "initial", "adapter_model.safetensors"), tensors(expected / "initial", "adapter_model.safetensors"))
    for name in ("initial", "adapters"):
        config = "adapter_config.json"
        assert (tmp_path / name / config).read_text().replace(str(tmp_path), "") == (expected / name / config).read_text().replace(
            str(expected), ""
        )
    for folder, file in (("merged", "model.safetensors"), ("adapters", "adapter_model.safetensors")):
        here, one = tensors(tmp_path / folder, file), tensors(expected / folder, file)
        assert here.keys() == one.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(here[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    base, merged = tensors(expected / "base"), tensors(tmp_path / "merged")
    frozen = {name for name in base if name.endswith(("k_proj.weight", "gate_proj.weight", "up_proj.weight"))}
    assert_bitwise({name: merged[name] for name in frozen}, {name: base[name] for name in frozen})
    for live, boxes in found:
        for name in live.keys() & merged.keys():
            torch.testing.assert_close(live[name], merged[name][boxes[name]], rtol=1e-6, atol=1e-6)


def test_a_built_module_on_a_mesh(tmp_path):
    """Its adapters are drawn with the seed of the run, and are those of rank 0 on every rank."""
    run_on_ranks(2, job_run, MESHES["fsdp"], str(tmp_path), "module")
    a = tensors(tmp_path / "initial", "adapter_model.safetensors")["base_model.model.head.lora_A.weight"]
    assert 0 < a.abs().max() <= CONFIG.hidden_size**-0.5


def job_load(degrees, folder):
    run = trainer(stack(), degrees, source_model=f"{folder}/base")
    peft.load_adapters(run, f"{folder}/adapters")
    peft.export_adapters(run, f"{folder}/again")
    run.close()


@pytest.mark.parametrize("mesh", MESHES)
def test_adapter_files_load_on_a_mesh(expected, tmp_path, mesh):
    """Each rank takes its part, and the files that the mesh writes then are the same."""
    for name in ("base", "adapters"):
        (tmp_path / name).symlink_to(expected / name)
    run_on_ranks(2, job_load, MESHES[mesh], str(tmp_path))
    file = "adapter_model.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (expected / "adapters" / file).read_bytes()


def job_patterns(degrees, methods, expected_error, tie=False):
    """Names of what this rank trained."""
    base = functools.partial(Decoder, dataclasses.replace(CONFIG, tie_embeddings=tie))
    run = trainer(stack(*methods, base=lambda stage: base(stage)), degrees)
    found: list[str] = []
    if expected_error is None:
        run.fit()
        if tie:
            with pytest.raises(NotImplementedError, match=r"'embedding.weight' is tied and tuned in full"):
                peft.export_adapters(run, "never")
        found = [row.name for row in run.parameters.trainable()]
    else:
        with pytest.raises(expected_error[0], match=expected_error[1]):
            run.build()
    run.close()
    return found


def test_a_pattern_needs_to_match_on_one_stage_only():
    """Names are global; a stage on which nothing matches is fine, nothing anywhere is an error on every rank."""
    methods = [peft.LoRA(2, targets=["embedding", "layers.1.*.q_proj"])]
    first, last = run_on_ranks(2, job_patterns, MESHES["stages"], methods, None)
    assert first == ["embedding.lora.A", "embedding.lora.B"]
    assert last == ["layers.1.attention.q_proj.lora.A", "layers.1.attention.q_proj.lora.B"]
    unmatched = (ValueError, r"'layers\.2\.\*' of LoRA.*embedding.*head")
    run_on_ranks(2, job_patterns, MESHES["stages"], [peft.LoRA(2, targets=["layers.2.*"])], unmatched)


@pytest.mark.parametrize("mesh", ["fsdp", "stages"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_part_of_the_model_may_be_frozen_as_a_whole(mesh, layer):
    """A stage, or an FSDP unit, without anything to train."""
    found = run_on_ranks(2, job_patterns, MESHES[mesh], [peft.LoRA(2, targets=[f"layers.{layer}.*.q_proj"])], None)
    assert {name for of_rank in found for name in of_rank} == {f"layers.{layer}.attention.q_proj.lora.{matrix}" for matrix in "AB"}


def test_a_tie_between_stages():
    """It takes no adapter, and is trained in full in both of them."""
    refused = (NotImplementedError, "'embedding.weight', a tied weight")
    run_on_ranks(2, job_patterns, MESHES["stages"], [peft.LoRA(2, targets=["embedding"])], refused, True)
    found = run_on_ranks(2, job_patterns, MESHES["stages"], [peft.LoRA(2, targets=["*.q_proj"]), peft.FullTuning("embedding")], None, True)
    assert all("embedding.weight" in of_rank for of_rank in found)


def job_gradients(shape, is_sequence):
    """The largest relative difference of gradients to one process, and whether those of the adapters are there at all."""
    mesh, model = make_mesh(**shape), double_decoder(vocab_size=11)
    find_matches(model, [peft.LoRA(2, 6, targets=["*_proj", "embedding", "head"]), peft.FullTuning("*norm")]).apply()
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    num_data_ranks = shape.get("shard", 1)
    data_rank = torch.distributed.get_rank() // shape["tp"]
    losses = [lambda model, r=r: token_loss(model, double_tokens(r)) for r in range(num_data_ranks)]
    wanted = {name: gradient for name, gradient in gradients(model, losses).items() if gradient is not None}
    plan = model.tensor_plan(shape["tp"])
    parallelize_tensor(model, mesh["tp"], plan if is_sequence else {name: style for name, style in plan.items() if style != "sequence"})
    if num_data_ranks > 1:
        for block in model.layers.values():
            parallelize_fsdp(block, mesh["shard"])
        parallelize_fsdp(model, mesh["shard"])
    token_loss(model, double_tokens(data_rank)).backward()
    found = {name: gradient for name, gradient in whole_gradients(model, mesh).items() if name in wanted}
    return largest_difference(found, wanted), min(wanted[name].abs().max().item() for name in wanted)


@pytest.mark.parametrize(("shape", "is_sequence"), [({"tp": 2}, False), ({"tp": 2}, True), ({"shard": 2, "tp": 2}, True)])
def test_gradients_of_adapters_of_cut_layers_are_those_of_one_process(shape, is_sequence):
    """Column, row and vocabulary: the whole one of A and B has one term of its gradient on each rank. In fp64."""
    for difference, smallest in run_on_ranks(2 * shape.get("shard", 1), job_gradients, shape, is_sequence):
        assert difference < 1e-10 and smallest > 0


class HalfLinear(nn.Sequential):
    """B112: a bf16 base."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float()


def job_two_dtypes(methods):
    def base() -> nn.Module:
        return HalfLinear().bfloat16()

    data = AutoDataProvider([(torch.randn(4), torch.randn(4)) for _ in range(8)], global_batch_size=4)
    task = SupervisedTask(nn.functional.mse_loss)
    run = on_mesh(stack(*methods, base=base), task, data, {"dp_shard": 2}, total_steps=2, optimizer=sgd(1.0))
    run.build()
    before = {row.name: row.local.detach().clone() for row in run.parameters}
    run.fit()
    rows = {row.name: (row.trainable, row.local.dtype, torch.equal(row.local, before[row.name])) for row in run.parameters}
    run.close()
    return rows


@pytest.mark.parametrize("more", [(), (peft.FullTuning("2"),)])
def test_adapters_in_float32_over_a_bf16_base_under_fsdp(more):
    """B112: it trains; the base is unchanged, the adapters changed, in fp32. So does bf16 beside them, as FSDP units of their own."""
    for rows in run_on_ranks(2, job_two_dtypes, [peft.LoRA(2, targets=["[01]"], dtype=torch.float32), *more]):
        for name, (is_trained, dtype, is_unchanged) in rows.items():
            assert dtype == (torch.float32 if "lora" in name else torch.bfloat16)
            assert is_unchanged == (not is_trained), name


def job_dropout(style):
    """The dropout masks of two ranks of a tensor group, as the outputs of an adapter that passes its inputs on."""
    mesh = make_mesh(tp=2)
    model = nn.ModuleDict({"layer": nn.Linear(16, 16, bias=False)})
    find_matches(model, [peft.LoRA(16, targets=["layer"], dropout=0.5)]).apply()
    nn.init.zeros_(model.layer.weight)
    nn.init.eye_(model.layer.lora.A)
    nn.init.eye_(model.layer.lora.B)
    parallelize_tensor(model, mesh["tp"], {"layer": style})
    torch.manual_seed(0)
    return model.layer(torch.ones(1, 16 if style == "column" else 8)).flatten().tolist()


def test_dropout_of_cut_layers():
    """Of whole inputs all ranks drop the same, of inputs that are cut each drops its own."""
    one, other = run_on_ranks(2, job_dropout, "column")
    torch.manual_seed(0)
    assert one + other == nn.functional.dropout(torch.ones(16), 0.5).tolist()
    one, other = run_on_ranks(2, job_dropout, "row")
    assert one == other and one[:8] != one[8:] and set(one) == {0.0, 2.0}
