"""The degrees of parallelism: what is left of the world, what does not fit it, and the device."""

import pytest
import torch

from trainer_kit import MeshStrategy
from trainer_kit.exceptions import ConfigurationError, UnsupportedError


@pytest.mark.parametrize(
    ("degrees", "world_size", "expected"),
    [
        ({}, 1, {"dp_replicate": 1, "dp_shard": 1}),
        ({}, 6, {"dp_replicate": 6, "dp_shard": 1}),
        ({"tp": 2}, 8, {"dp_replicate": 4, "tp": 2}),
        ({"dp_shard": -1}, 8, {"dp_replicate": 1, "dp_shard": 8}),
        ({"dp_shard": -1, "tp": 2, "pp": 2}, 8, {"dp_replicate": 1, "dp_shard": 2, "tp": 2, "pp": 2}),
        ({"dp_shard": -1, "dp_replicate": 2}, 8, {"dp_replicate": 2, "dp_shard": 4}),
        ({"dp_replicate": 2, "cp_shard": 2, "cp_replicate": 2}, 8, {"dp_replicate": 2, "cp_shard": 2, "cp_replicate": 2}),
        ({"tp": 4}, 4, {"dp_replicate": 1, "tp": 4}),
    ],
)
def test_a_free_degree_takes_what_is_left_of_the_world(degrees, world_size, expected):
    """Contract 9: the product of all degrees is the world size."""
    resolved = MeshStrategy(**degrees).resolve(world_size).model_dump()
    assert {name: degree for name, degree in resolved.items() if name != "device" and degree != 1} == {
        name: degree for name, degree in expected.items() if degree != 1
    }


@pytest.mark.parametrize(
    ("degrees", "world_size", "words"),
    [
        ({"dp_replicate": 2, "dp_shard": 2}, 2, ("dp_replicate 2", "dp_shard 2", "4", "2 ranks")),
        ({"dp_replicate": 1, "tp": 2, "pp": 2}, 2, ("tp 2", "pp 2", "4", "2 ranks")),
        ({"tp": 3}, 8, ("tp 3", "8 ranks")),
        ({"dp_replicate": 1}, 2, ("1", "2 ranks")),
        ({"tp": 8}, 4, ("tp 8", "4 ranks")),
        ({"dp_shard": -1, "dp_replicate": -1}, 4, ("dp_replicate", "dp_shard", "-1")),
        ({"pp": -1, "dp_replicate": 1}, 4, ("pp", "-1")),
    ],
)
def test_degrees_that_do_not_fit_the_world_are_refused_with_all_numbers(degrees, world_size, words):
    """B144: an explicit mesh must be the world; nothing is overridden."""
    with pytest.raises(ConfigurationError) as caught:
        MeshStrategy(**degrees).resolve(world_size)
    assert all(word in str(caught.value) for word in words), caught.value


def test_degrees_are_checked_before_any_process_group(monkeypatch):
    """B144 and contract 9: 2 x 2 on two ranks fails in `build`, and nothing was started."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"4.*2 ranks"):
        MeshStrategy(dp_replicate=2, tp=2).build()
    with pytest.raises(UnsupportedError, match=r"2 ranks"):
        MeshStrategy().build()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("degree", [0, -2, 1.5, "two"])
def test_a_degree_is_a_positive_number_or_what_is_left(degree):
    with pytest.raises(ConfigurationError, match=r"tp="):
        MeshStrategy(tp=degree)


def test_an_unknown_degree_names_the_nearest():
    """B141."""
    with pytest.raises(ConfigurationError, match=r"did you mean 'dp_replicate'"):
        MeshStrategy(dp_replicat=2)


def test_a_strategy_never_changes():
    with pytest.raises(ValueError, match=r"frozen"):
        MeshStrategy().tp = 2


def test_the_default_is_one_process_on_the_best_device(monkeypatch):
    """Contract 10: without a launcher, without a process group; the accelerator, if there is one."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    context = MeshStrategy().build()
    assert context.device.type == "xpu" and (context.rank, context.world_size, context.num_data_ranks) == (0, 1, 1)
    assert MeshStrategy(device="cpu").build().device == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert MeshStrategy().build().device == torch.device("cpu")


def test_a_named_device_is_never_replaced(monkeypatch):
    """B144: a device that is not here is an error that says what is."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    with pytest.raises(ConfigurationError, match=r"'mps'.*not available.*cpu, xpu"):
        MeshStrategy(device="mps").build()
    with pytest.raises(ConfigurationError, match=r"no torch device"):
        MeshStrategy(device="the big one").build()
