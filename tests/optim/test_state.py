"""State of an optimizer by parameter name, out and back."""

import json

import pytest
import torch
from torch import nn

from trainer_kit.exceptions import CheckpointError, UnsupportedError
from trainer_kit.mesh.layout import Layout
from trainer_kit.optim import (
    SGD,
    Adam,
    AdamW,
    Muon,
    StochasticAdamW,
    as_optimizer_provider,
    build_optimizer,
    check_optimizer_state,
    group_values,
    load_group_values,
    load_optimizer_state,
    materialize_state,
    optimizer_tensors,
    optimizer_values,
)
from trainer_kit.parameters import ParameterRow

PROVIDERS = [
    AdamW(), Adam(amsgrad=True), SGD(momentum=0.9), SGD(), Muon(), StochasticAdamW(state_dtype="bf16"),
    as_optimizer_provider(lambda given: torch.optim.NAdam(given)),
]  # fmt: skip


def make(provider, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "embed.weight": (5, 2)}
    parameters = {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}
    return build_optimizer(provider, list(parameters.items())), parameters


def step(optimizer, parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def names_of(parameters):
    return {parameter: name for name, parameter in parameters.items()}


def save(optimizer, parameters):
    """What goes through a checkpoint: tensors copied, values through JSON."""
    names = names_of(parameters)
    tensors = {key: value.clone() for key, value in optimizer_tensors(optimizer, names).items()}
    return tensors, json.loads(json.dumps(optimizer_values(optimizer, names)))


def shapes_of(tensors):
    return {key: tuple(value.shape) for key, value in tensors.items()}


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: getattr(provider, "name", "nadam"))
def test_a_resumed_run_is_bitwise_the_straight_one(provider, num_before):
    """Contract 27, B25: the moments are there after a load, and the next updates equal those of the straight run."""
    straight, expected = make(provider)
    for seed in range(num_before):
        step(straight, expected, seed)
    tensors, values = save(straight, expected)
    resumed, parameters = make(provider)
    for name, parameter in parameters.items():
        parameter.data.copy_(expected[name])
    materialize_state(resumed)
    check_optimizer_state(resumed, names_of(parameters), shapes_of(tensors), values)
    assert load_optimizer_state(resumed, names_of(parameters), tensors, values) == []
    loaded = optimizer_tensors(resumed, names_of(parameters))
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[key], tensors[key]) and loaded[key].dtype == tensors[key].dtype for key in tensors)
    for seed in range(10, 13):
        step(straight, expected, seed)
        step(resumed, parameters, seed)
    assert all(torch.equal(expected[name], parameters[name]) for name in expected)


@pytest.mark.parametrize(("parameter_dtype", "moment_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_dtype_and_bits_of_every_state_tensor_survive(parameter_dtype, moment_dtype):
    """B18: torch's own loading casts to the dtype of the parameter."""
    provider = as_optimizer_provider(lambda given: torch.optim.AdamW(given))
    optimizer, parameters = make(provider, parameter_dtype)
    materialize_state(optimizer)
    tensors, values = save(optimizer, parameters)
    generator = torch.Generator().manual_seed(1)
    for key in tensors:
        if key.endswith("exp_avg"):
            tensors[key] = torch.randn(tensors[key].shape, generator=generator).to(moment_dtype)
    remarks = load_optimizer_state(optimizer, names_of(parameters), tensors, values)
    for key, value in optimizer_tensors(optimizer, names_of(parameters)).items():
        assert value.dtype == tensors[key].dtype
        assert torch.equal(value, tensors[key])
    assert optimizer.state[parameters["a.bias"]]["step"].dtype == torch.float32
    assert len(remarks) == 1
    assert "exp_avg" in remarks[0]
    assert "3 parameters" in remarks[0]


def test_loading_fills_the_live_tensors_in_place():
    optimizer, parameters = make(AdamW())
    materialize_state(optimizer)
    live = optimizer_tensors(optimizer, names_of(parameters))
    saved = {key: torch.full_like(value, 2.0) for key, value in live.items()}
    load_optimizer_state(optimizer, names_of(parameters), saved)
    after = optimizer_tensors(optimizer, names_of(parameters))
    assert all(after[key] is live[key] and (live[key] == 2).all() for key in live)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("a.bias/exp_avg"), "missing 'a.bias/exp_avg'"),
        (lambda tensors: tensors.update({"b/exp_avg": torch.ones(2)}), "unexpected 'b/exp_avg'"),
        (lambda tensors: tensors.update({"a.bias/exp_avg": torch.ones(2)}), r"'a.bias/exp_avg' has shape \(2,\).*\(4,\)"),
        (lambda tensors: tensors.clear(), "missing 'a.weight/step'.* and 5 more"),
    ],
)
def test_state_that_does_not_fit_is_an_error_and_changes_nothing(change, words):
    """Contract 27, B25."""
    optimizer, parameters = make(AdamW())
    step(optimizer, parameters, 0)
    before, _ = save(optimizer, parameters)
    tensors = {key: torch.zeros_like(value) for key, value in before.items()}
    change(tensors)
    with pytest.raises(CheckpointError, match=words):
        load_optimizer_state(optimizer, names_of(parameters), tensors)
    with pytest.raises(CheckpointError, match=words):
        check_optimizer_state(optimizer, names_of(parameters), shapes_of(tensors))
    assert all(torch.equal(value, before[key]) for key, value in optimizer_tensors(optimizer, names_of(parameters)).items())


@pytest.mark.parametrize(
    ("saved", "now", "words"),
    [
        (SGD(), AdamW(), r"is that of SGD, this run has AdamW\. Set optimizer="),  # no state, which would fit any optimizer
        (SGD(momentum=0.9), AdamW(), "is that of SGD, this run has AdamW"),
        (Adam(), AdamW(), "is that of Adam, this run has AdamW"),  # the same keys
        (AdamW(), Muon(), "is that of AdamW, this run has Muon and AdamW"),
        (Muon(), SGD(), "is that of Muon and AdamW, this run has SGD"),
    ],
)
def test_the_state_of_another_optimizer_is_an_error_that_names_both(saved, now, words):
    """Contract 27: nothing is silently left at its fresh value."""
    first, parameters = make(saved)
    step(first, parameters, 0)
    tensors, values = save(first, parameters)
    second, others = make(now)
    materialize_state(second)
    before, _ = save(second, others)
    with pytest.raises(CheckpointError, match=words):
        check_optimizer_state(second, names_of(others), shapes_of(tensors), values)
    with pytest.raises(CheckpointError, match=words):
        load_optimizer_state(second, names_of(others), tensors, values)
    assert all(torch.equal(value, before[key]) for key, value in optimizer_tensors(second, names_of(others)).items())


def test_tensors_in_place_of_plain_values_and_the_reverse_are_an_error():
    optimizer, parameters = make(AdamW())
    materialize_state(optimizer)
    shapes = shapes_of(optimizer_tensors(optimizer, names_of(parameters)))
    del shapes["a.bias/exp_avg"]
    with pytest.raises(CheckpointError, match=r"'a.bias/exp_avg' is a float in the checkpoint, expected a Tensor"):
        check_optimizer_state(optimizer, names_of(parameters), shapes, {"state": {"a.bias/exp_avg": 0.5}})
    optimizer.state[parameters["a.bias"]]["exp_avg"] = 0.5
    with pytest.raises(CheckpointError, match=r"'a.bias/exp_avg' is a Tensor in the checkpoint, expected a float"):
        check_optimizer_state(optimizer, names_of(parameters), {**shapes, "a.bias/exp_avg": (4,)})


def test_a_parameter_without_state_that_is_no_longer_there_is_unexpected():
    optimizer, parameters = make(SGD())
    _, values = save(optimizer, parameters)
    with pytest.raises(CheckpointError, match=r"does not fit SGD: unexpected 'gone'"):
        check_optimizer_state(optimizer, names_of(parameters), {}, {**values, "stateless": [*values["stateless"], "gone"]})


def test_state_that_is_neither_tensor_nor_plain_is_refused():
    optimizer, parameters = make(SGD())
    optimizer.state[parameters["a.bias"]]["history"] = [torch.ones(1)]
    with pytest.raises(UnsupportedError, match=r"'history' of 'a.bias'"):
        optimizer_tensors(optimizer, names_of(parameters))


def test_state_that_is_not_cut_as_its_parameter_is_refused():
    """A shard's row statistics mean nothing on another mesh."""
    local = nn.Parameter(torch.ones(2, 3))
    row = ParameterRow("a.weight", (), local, 0, local, Layout((4, 3), (0, 0), (2, 3), 2, ("dp_cp_shard",)), {})
    optimizer = torch.optim.SGD([local])
    optimizer.state[local] = {"step": torch.zeros(()), "buffer": torch.zeros(2, 3), "count": torch.zeros(1)}
    assert {key: tuple(value.shape) for key, value in optimizer_tensors(optimizer, {local: row}).items()} == {
        "a.weight/step": (), "a.weight/buffer": (2, 3), "a.weight/count": (1,)
    }  # fmt: skip
    check_optimizer_state(optimizer, {local: row}, {"a.weight/step": (), "a.weight/buffer": (4, 3), "a.weight/count": (1,)})
    with pytest.raises(CheckpointError, match=r"'a.weight/buffer' has shape \(2, 3\) in the checkpoint, expected \(4, 3\)"):
        check_optimizer_state(optimizer, {local: row}, {"a.weight/step": (), "a.weight/buffer": (2, 3), "a.weight/count": (1,)})
    optimizer.state[local]["rows"] = torch.zeros(2)
    with pytest.raises(UnsupportedError, match=r"'rows' of 'a.weight'.*part of shape \(2, 3\).*elementwise = False"):
        optimizer_tensors(optimizer, {local: row})


def test_group_values_restore_what_a_callback_changed_and_report_what_the_settings_changed():
    first, _ = make(AdamW(lr=0.1, weight_decay=0.2, groups=[{"pattern": "embed.*", "lr": 0.3}]))
    first.param_groups[0]["lr"] = 0.05  # a callback, during the run
    saved = json.loads(json.dumps(group_values(first)))
    same, _ = make(AdamW(lr=0.1, weight_decay=0.2, groups=[{"pattern": "embed.*", "lr": 0.3}]))
    assert load_group_values(same, saved) == []
    assert [(group["name"], group["lr"], group["betas"]) for group in same.param_groups] == [
        ("default", 0.05, (0.9, 0.999)), ("no_decay", 0.1, (0.9, 0.999)), ("embed.*", 0.3, (0.9, 0.999)),
    ]  # fmt: skip
    changed, _ = make(AdamW(lr=0.2, weight_decay=0.2, betas=(0.8, 0.999)))
    remarks = load_group_values(changed, saved)
    assert changed.param_groups[0]["lr"] == 0.2
    assert "optimizer group 'default': lr was 0.1, is 0.2 now" in remarks
    assert "optimizer group 'default': betas was [0.9, 0.999], is [0.8, 0.999] now" in remarks
    assert "optimizer group 'embed.*' of the checkpoint is no longer there" in remarks


def test_group_values_of_a_tensor_lr_are_numbers_and_fill_the_tensor():
    provider = as_optimizer_provider(lambda given: torch.optim.AdamW(given, lr=torch.tensor(0.5), fused=True))
    optimizer, _ = make(provider)
    saved = json.loads(json.dumps(group_values(optimizer)))
    saved["group0"]["values"]["lr"] = 0.25
    lr = optimizer.param_groups[0]["lr"]
    load_group_values(optimizer, saved)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
