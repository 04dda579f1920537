"""What `adapt` trains and freezes, patterns that match nothing, built modules, and source models."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.peft.common import CONFIG, STACK, assert_bitwise, decoder, stack, tensors, trainer
from trainer_kit import peft
from trainer_kit.exceptions import CheckpointError, ConfigurationError, ModelError, UnsupportedError
from trainer_kit.models import Decoder
from trainer_kit.peft.inject import find_matches

TIED = dataclasses.replace(CONFIG, tie_embeddings=True)


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_what_is_not_named_is_frozen_and_stays_as_it_is():
    """Contract 13; a stack of two LoRAs and full tuning, each in its place."""
    full = peft.FullTuning("norm", "layers.1.attention_norm.weight")
    methods = peft.LoRA(2, targets="*.q_proj"), peft.LoRA(4, targets=["*.up_proj"]), full
    run = trainer(stack(*methods))
    run.build()
    before = values(run.model)
    names = [f"layers.{i}.{part}.lora.{m}" for i in "01" for part in ("attention.q_proj", "feed_forward.up_proj") for m in "AB"]
    assert set(trained(run.model)) == {*names, "norm.weight", "layers.1.attention_norm.weight"}
    run.fit()
    changed = {name for name, value in values(run.model).items() if not torch.equal(value, before[name])}
    assert changed == set(trained(run.model))


def test_the_base_is_the_model_without_adapters():
    """Contract 11: initial values are a function of the seed and the name, so adapters change those of no other module."""
    run, base = trainer(stack()), trainer(decoder)
    run.build()
    base.build()
    found = {name: value for name, value in values(run.model).items() if "lora" not in name}
    assert_bitwise(found, values(base.model))


@pytest.mark.parametrize(
    ("methods", "texts"),
    [
        ([peft.LoRA(2, targets=["*.q_proj", "*.qproj"])], ["'*.qproj'", "LoRA", "layers.*.attention.q_proj"]),
        ([peft.LoRA(2, targets=["embeding"])], ["'embeding'", "did you mean 'embedding'?"]),
        ([peft.LoRA(2, targets=["*norm"])], ["'*norm'", "layer that can be adapted"]),
        ([*STACK, peft.FullTuning("nrm.weight")], ["FullTuning", "'nrm.weight'", "did you mean 'norm.weight'?"]),
        ([peft.LoRA(2, targets=["*.q_proj"]), peft.LoRA(2, targets=["*.[qv]_proj"])], ["layers.0.attention.q_proj.weight", "second LoRA"]),
    ],
)
def test_patterns_that_fit_nothing_are_errors(methods, texts):
    """Issue 5: nothing matched is an error that names the nearest modules; the model is as before."""
    model = decoder()
    with pytest.raises(ConfigurationError) as error:
        trainer(peft.adapt(model, *methods)).build()
    assert all(text in str(error.value) for text in texts)
    assert trained(model) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda: peft.LoRA(0, targets="*"),
        lambda: peft.LoRA(2, -1, targets="*"),
        lambda: peft.LoRA(2, targets=[]),
        lambda: peft.LoRA(2, targets="*", dropout=1.0),
        lambda: peft.LoRA(2, targets="*", dtype=torch.int32),
        lambda: peft.FullTuning(),
        lambda: peft.adapt(decoder),
        lambda: peft.adapt(decoder, "lora"),
        lambda: peft.adapt(decoder, *STACK, base_dtype=torch.int8),
    ],
)
def test_wrong_arguments(make):
    with pytest.raises(ConfigurationError):
        make()


def test_a_tied_weight_takes_no_adapter():
    """A merged export would change both of its layers."""
    tied = Decoder(TIED)
    with pytest.raises(UnsupportedError, match="tied weight"):
        trainer(peft.adapt(tied, peft.LoRA(2, targets=["embedding"]))).build()
    run = trainer(peft.adapt(lambda: Decoder(TIED), peft.FullTuning("head")))
    run.build()
    assert trained(run.model) == ["embedding.weight"]


def test_a_built_module_is_adapted_in_place_and_can_be_trained_again():
    model = decoder()
    before = values(model)
    provider = stack(base=model)
    run = trainer(provider)
    run.fit()
    assert run.model is model
    assert_bitwise({name: value for name, value in values(model).items() if name in before and "norm" not in name},
                   {name: value for name, value in before.items() if "norm" not in name})  # fmt: skip
    again = trainer(provider)
    again.fit()
    assert again.model is model
    with pytest.raises(ModelError, match="has adapters already"):
        trainer(stack(base=model)).build()


def test_layers_that_are_not_called_are_not_adapted():
    """MultiheadAttention reads the weight of its out_proj, so an adapter there would never run."""
    model = nn.MultiheadAttention(8, 2)
    assert find_matches(model, [peft.LoRA(2, targets=["out_proj"])]).outcome.unmatched == [(0, "out_proj")]


def test_the_base_loads_from_a_source_model_that_has_no_adapters(tmp_path):
    """Contract 12, B95: nothing else may be missing."""
    base = trainer(decoder, seed=7)
    base.fit()
    base.export(tmp_path / "base")
    run = trainer(stack(), source_model=tmp_path / "base")
    run.build()
    assert_bitwise({name: value for name, value in values(run.model).items() if "lora" not in name}, tensors(tmp_path / "base"))
    odd = nn.Sequential()
    odd.add_module("a[0]", nn.Linear(2, 2))
    save_file(odd.state_dict(), tmp_path / "odd.safetensors")
    trainer(peft.adapt(odd, peft.LoRA(1, targets=["a*"])), source_model=tmp_path / "odd.safetensors").build()
    other = trainer(peft.adapt(lambda: nn.Sequential(nn.Linear(2, 2)), peft.LoRA(1, targets=["0"])), source_model=tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"missing .*'0\.weight'"):
        other.build()


def test_an_exported_model_goes_on_as_a_base(tmp_path):
    """The layout of an export is that of the base model."""
    run = trainer(stack())
    run.fit()
    run.export(tmp_path)
    assert tensors(tmp_path).keys() == dict(decoder().named_parameters()).keys()
    trainer(stack(), source_model=tmp_path).fit()


def test_the_base_in_bf16_with_adapters_in_float32():
    run = trainer(stack(peft.LoRA(2, targets=["*_proj"]), base_dtype=torch.bfloat16), precision="bf16-mixed")
    run.fit()
    dtypes = {name: parameter.dtype for name, parameter in run.model.named_parameters()}
    assert all(dtype == (torch.float32 if "lora" in name else torch.bfloat16) for name, dtype in dtypes.items())


def test_the_methods_are_told_to_the_loggers():
    assert stack().hparams()["peft/0/LoRA/scale"] == 2.0
