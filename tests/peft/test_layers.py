"""Adapted layers against the formulas of the papers, in one process; merging and undoing it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.peft.common import CONFIG, assert_bitwise, decoder, stack, tensors, tokens, trainer
from trainer_kit import peft
from trainer_kit.exceptions import ModelError, StateError
from trainer_kit.models import Decoder
from trainer_kit.peft.inject import adapted_weights, find_matches


def adapted(layer: nn.Module, method: peft.LoRA) -> nn.Module:
    """The layer as the only one of a model, with an A and a B that are not zero."""
    model = nn.Sequential(layer)
    find_matches(model, [method]).apply()
    for matrix in model.parameters():
        if matrix.requires_grad:
            nn.init.normal_(matrix)
    return model


def lora(*args, **options) -> peft.LoRA:
    return peft.LoRA(*args, targets=["0"], **options)


@pytest.mark.parametrize(("method", "scale"), [(lora(4, 8), 2.0), (lora(4), 1.0), (lora(4, 8, rslora=True), 4.0)])
def test_a_linear_layer_adds_the_scaled_product(method, scale):
    """arXiv:2106.09685 section 4.1; rsLoRA: alpha / sqrt(r), arXiv:2312.03732."""
    layer = nn.Linear(5, 7)
    model, x = adapted(layer, method), torch.randn(2, 3, 5)
    expected = F.linear(x, layer.weight + scale * layer.lora.B @ layer.lora.A, layer.bias)
    torch.testing.assert_close(model(x), expected)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.lora.A", "0.lora.B"]


def test_an_embedding_adds_the_scaled_product_and_leaves_the_padding():
    layer = nn.Embedding(9, 5, padding_idx=0)
    model, ids = adapted(layer, lora(3, 6)), torch.tensor([[1, 8, 0]])
    table = layer.weight + 2 * layer.lora.A @ layer.lora.B.T
    torch.testing.assert_close(model(ids), F.embedding(ids, table))
    model(ids).sum().backward()
    assert layer.lora.A.grad[0].count_nonzero() == 0 and layer.lora.A.grad[1].count_nonzero() > 0


def test_a_part_of_an_embedding_without_rows_keeps_its_graph():
    """More ranks than rows of the table: the backward communicates, so every rank has one."""
    layer = nn.Embedding(4, 5)
    model = adapted(layer, lora(2))
    layer.lora.A = nn.Parameter(torch.empty(0, 2))
    found = layer.lora(torch.tensor([[1, 2, 3]]))
    assert found.shape == (1, 3, 5) and found.count_nonzero() == 0
    found.sum().backward()
    assert all(matrix.grad is not None for matrix in model[0].lora.parameters())


def test_dropout_is_on_the_inputs_of_a_alone_and_only_in_training():
    layer = nn.Linear(64, 8)
    model, x = adapted(layer, lora(4, dropout=0.5)), torch.randn(3, 64)
    torch.manual_seed(1)
    found = model(x)
    torch.manual_seed(1)
    expected = layer.lora.scale * F.linear(F.linear(F.dropout(x, 0.5), layer.lora.A), layer.lora.B)
    torch.testing.assert_close(found - F.linear(x, layer.weight, layer.bias), expected)
    model.eval()
    torch.testing.assert_close(model(x), F.linear(x, layer.weight + layer.lora.B @ layer.lora.A, layer.bias))


def test_the_first_values_are_those_of_the_paper_and_the_library():
    """A Kaiming-uniform with a = sqrt(5), B zero; an embedding has A zero and a normal B. So the model computes what it did."""
    layer = nn.Linear(100, 200)
    model = nn.Sequential(layer, nn.Embedding(300, 40))
    find_matches(model, [peft.LoRA(16, targets=["*"])]).apply()
    bound = math.sqrt(6 / ((1 + 5) * 100))
    a, b = model[1].lora.A, model[1].lora.B
    assert 0.99 * bound < layer.lora.A.abs().max() <= bound and layer.lora.B.count_nonzero() == 0
    assert a.count_nonzero() == 0 and abs(b.std() - 1) < 0.1
    x = torch.randn(3, 100)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_adapters_in_float32_on_a_bf16_layer():
    """The sum is taken in float32 and rounded once."""
    layer = nn.Linear(6, 4, dtype=torch.bfloat16)
    model, x = adapted(layer, lora(2, dtype=torch.float32)), torch.randn(3, 6, dtype=torch.bfloat16)
    assert layer.lora.A.dtype == torch.float32
    delta = F.linear(F.linear(x.float(), layer.lora.A), layer.lora.B)
    expected = (F.linear(x, layer.weight, layer.bias).float() + delta).bfloat16()
    assert torch.equal(model(x), expected)


def test_a_merged_export_is_the_formula(tmp_path):
    """B96: W = I, known A and B, scale 2."""

    class Known(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.eye_(self.weight)

    run = trainer(peft.adapt(lambda: nn.Sequential(Known(3, 3, bias=False)), peft.LoRA(1, 2, targets=["0"])))
    run.build()
    run.model[0].lora.A.data.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
    run.model[0].lora.B.data.copy_(torch.tensor([[1.0], [0.0], [-1.0]]))
    run.export(tmp_path)
    expected = torch.tensor([[3.0, 4.0, 6.0], [0.0, 1.0, 0.0], [-2.0, -4.0, -5.0]])
    assert torch.equal(tensors(tmp_path)["0.weight"], expected)
    assert torch.equal(run.model[0].weight, torch.eye(3))


def test_merging_is_done_in_float32_and_rounded_once(tmp_path):
    """B96: merged in low precision, the quality collapses."""
    run = trainer(stack(peft.LoRA(4, 8, targets=["*_proj"]), base_dtype=torch.bfloat16))
    run.build()
    layer = run.model.layers["0"].attention.q_proj
    for matrix in (layer.lora.A, layer.lora.B):
        nn.init.normal_(matrix)
    run.export(tmp_path)
    assert (layer.weight.dtype, layer.lora.A.dtype) == (torch.bfloat16, torch.float32)
    expected = (layer.weight.float() + 2 * (layer.lora.B @ layer.lora.A)).bfloat16()
    assert torch.equal(tensors(tmp_path)["layers.0.attention.q_proj.weight"], expected)


def test_exporting_changes_nothing(tmp_path):
    """B96: exporting twice gives equal files, and the next training step is the same."""
    runs = [trainer(stack()), trainer(stack())]
    for run in runs:
        run.fit(2)
    for name in ("one", "two"):
        runs[0].export(tmp_path / name)
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    for run in runs:
        run.fit(3)
    assert_bitwise(dict(runs[0].model.named_parameters()), dict(runs[1].model.named_parameters()))


def test_the_merged_export_loads_into_the_base_model_with_equal_outputs(tmp_path):
    run = trainer(stack())
    run.fit()
    run.export(tmp_path)
    base = decoder()
    base.load_state_dict(tensors(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(base(tokens()), run.model.eval()(tokens()))


def test_merging_a_live_model_and_undoing_it():
    """Equal outputs, and every bit of the weights back."""
    run = trainer(stack())
    run.fit()
    model = run.model.eval()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        expected = model(tokens())
        with peft.merged(model):
            assert not torch.equal(model.head.weight, before["head.weight"])
            torch.testing.assert_close(model(tokens()), expected)
        assert torch.equal(model(tokens()), expected)
    assert_bitwise(dict(model.named_parameters()), before)


def test_a_merged_model_is_not_trained_or_merged_or_exported_again(tmp_path):
    """B96: twice the effect."""
    run = trainer(stack())
    run.build()
    with pytest.raises(StateError, match="not merged"):
        peft.unmerge(run.model)
    peft.merge(run.model)
    with pytest.raises(StateError, match="merged already"):
        peft.merge(run.model)
    with pytest.raises(StateError, match="unmerge"):
        run.export(tmp_path / "a")
    with pytest.raises(StateError, match="unmerge"):
        peft.export_adapters(run, tmp_path / "b")
    with pytest.raises(StateError, match="unmerge"):
        run.fit()
    peft.unmerge(run.model)
    run.fit()
    with pytest.raises(ModelError, match="no adapters"):
        peft.merge(Decoder(CONFIG))


def test_a_merged_model_is_not_saved_or_loaded_into(tmp_path):
    """B96: a checkpoint of merged weights would have the change twice, and `unmerge` would undo a load."""
    run = trainer(stack())
    run.fit()
    run.save_checkpoint(tmp_path / "a")
    with peft.merged(run.model):
        with pytest.raises(StateError, match="unmerge"):
            run.save_checkpoint(tmp_path / "b")
        with pytest.raises(StateError, match="unmerge"):
            run.load_checkpoint(tmp_path / "a")
    run.save_checkpoint(tmp_path / "b")


def test_encoder_layers_of_torch_compute_their_adapters_in_eval_mode_too():
    """B96: the fused kernel reads weights and calls no layer, so that adapters would count in training alone."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    find_matches(model, [peft.LoRA(2, targets=["*.linear[12]"])]).apply()
    for adapted in adapted_weights(model):
        nn.init.normal_(adapted.lora.B)
    expected = model.train()(x, src_key_padding_mask=padding)
    with torch.no_grad():
        found = model.eval()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[~padding])
    torch.testing.assert_close(model(x, src_key_padding_mask=padding)[~padding], expected[~padding])


def test_adapted_weights_know_their_names():
    model = decoder()
    find_matches(model, [peft.LoRA(2, targets=["*.q_proj", "head"])]).apply()
    found = [(item.name, item.lora_name) for item in adapted_weights(model)]
    assert found[0] == ("layers.0.attention.q_proj.weight", "layers.0.attention.q_proj.lora")
    assert found[-1] == ("head.weight", "head.lora") and len(found) == 3
    assert [item.name for item in adapted_weights(adapted(nn.Linear(2, 2), lora(1))[0])] == ["weight"]
