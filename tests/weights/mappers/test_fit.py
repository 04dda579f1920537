"""The dry run of a load: what it finds, and that it reads headers only."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trainer_kit.exceptions import CheckpointError, ConfigurationError
from trainer_kit.weights import Concatenate, IdentityMapper, ModelStateReader, Parallel, Rename, Transpose


@pytest.fixture
def stored(tmp_path):
    save_file({"w": torch.zeros(3, 2), "b": torch.zeros(3), "extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


def linear(inputs=2, outputs=3):
    with torch.device("meta"):
        return nn.Linear(inputs, outputs)


GOOD = Parallel([Rename("w", "weight"), Rename("b", "bias")])


def test_a_state_that_fits_a_model_without_memory(stored, monkeypatch):
    """Contract 35: nothing but headers is read."""
    monkeypatch.setattr(ModelStateReader, "read", None)
    report = GOOD.check(stored, linear(), allow_unexpected="extra")
    assert report and report.unused == ("extra",)
    assert str(report) == f"the model state at {stored} fits: 2 tensors are filled from 2"
    assert GOOD.check(ModelStateReader(stored), dict(linear().named_parameters()), allow_unexpected=["ex*"])


def test_everything_that_does_not_fit_is_in_the_report(stored):
    """Contract 35."""
    mapper = Parallel([Transpose("w", "weight"), Rename("bias", "bias"), Rename("b", "other")])
    report = mapper.check(stored, linear())
    assert not report
    assert (report.missing, report.unused, report.unknown) == (("bias",), ("extra",), ("other",))
    assert report.misfits == ("'weight' is [2, 3] in the files, [3, 2] in the model",)
    assert all(word in str(report) for word in ("bias", "extra", "other", "weight", "nothing was read"))


def test_a_shape_that_the_mapper_refuses_is_a_misfit(stored):
    """Contract 35: with tensor, shapes and argument."""
    report = Parallel([Concatenate(["w", "b"], "weight")]).check(stored, linear(), allow_missing="bias", allow_unexpected="extra")
    assert not report and "'b' has shape [3], expected [3, 2] beside 'w'" in str(report)


def test_tied_weights_need_one_of_their_names(stored):
    model = nn.Sequential(linear(), linear())
    model[1].weight, model[1].bias = model[0].weight, model[0].bias
    assert Parallel([Rename("w", "1.weight"), Rename("b", "0.bias")]).check(stored, model, allow_unexpected="extra")


def test_what_cannot_be_checked_raises(stored, tmp_path):
    with pytest.raises(CheckpointError, match="no model state"):
        GOOD.check(tmp_path / "nowhere", linear())
    with pytest.raises(ConfigurationError, match="contradict each other"):
        IdentityMapper(["w", "w"]).check(stored, linear())
