"""Runs with adapted models: checkpoints of adapters alone, recomputed activations, compiled blocks, a stream of merged weights."""

import logging

import pytest
import torch

from tests.peft.common import assert_bitwise, decoder, stack, tensors, trainer
from trainer_kit import peft
from trainer_kit.callbacks import Checkpoint
from trainer_kit.checkpoint.manifest import read_manifest


@pytest.fixture
def base(tmp_path):
    trainer(decoder, seed=5).export(tmp_path / "base")
    return tmp_path / "base"


def run(base, folder, **settings):
    return trainer(
        stack(), source_model=base, checkpoint_trainable_only=True, callbacks=[Checkpoint(folder, every=2)], total_steps=4, **settings
    )


def test_a_checkpoint_of_adapters_goes_on_with_the_base_of_the_source_model(base, tmp_path):
    """Contract 33: it holds what is trained alone, and 2 + 2 steps are 4, bit by bit."""
    whole = run(base, tmp_path / "run")
    whole.fit()
    names = {name.removeprefix("model/") for name in read_manifest(tmp_path / "run/step-00000002").tensors if name.startswith("model/")}
    assert names == {row.name for row in whole.parameters.trainable()} < {row.name for row in whole.parameters}
    resumed = run(base, tmp_path / "other")
    resumed.fit(resume=str(tmp_path / "run/step-00000002"))
    assert_bitwise(dict(resumed.model.named_parameters()), dict(whole.model.named_parameters()))


def test_another_base_is_said(base, tmp_path, caplog):
    """Contract 33: adapters on other weights are another model."""
    run(base, tmp_path / "run").fit(2)
    trainer(decoder, seed=6).export(base)
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        run(base, tmp_path / "run").fit()
    assert "frozen_weights" in caplog.text


def test_recomputed_activations_change_nothing():
    runs = [trainer(stack(), activation_checkpointing=value) for value in (False, True)]
    for one in runs:
        one.fit()
    assert_bitwise(dict(runs[0].model.named_parameters()), dict(runs[1].model.named_parameters()))


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_have_adapters_and_the_names_of_others(tmp_path):
    """With the tracer alone: what is generated for a device is not ours to test."""
    runs = [trainer(stack(), compile=value) for value in (False, {"backend": "eager"})]
    for number, one in enumerate(runs):
        one.fit()
        one.export(tmp_path / f"merged{number}")
        peft.export_adapters(one, tmp_path / f"adapters{number}")
    for folder, file in (("merged", "model.safetensors"), ("adapters", "adapter_model.safetensors")):
        plain, compiled = (tensors(tmp_path / f"{folder}{number}", file) for number in (0, 1))
        assert plain.keys() == compiled.keys()
        for name, tensor in plain.items():
            torch.testing.assert_close(compiled[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_stream_of_the_model_state_is_the_merged_export(tmp_path):
    """B151: an engine that knows no adapters gets the whole model."""
    one = trainer(stack())
    one.fit()
    one.export(tmp_path)
    with one.model_state(bucket_bytes=1000) as stream:
        found = {name: tensor.clone() for bucket in stream for name, tensor in bucket}
    assert_bitwise(found, tensors(tmp_path))
