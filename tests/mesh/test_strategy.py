"""The degrees of parallelism: what is left of the world, what does not fit it, and the device."""

import pytest
import torch

from trainer_kit import MeshStrategy
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.place import Place
from trainer_kit.mesh.strategy import _device_of_rank


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
    assert {name: degree for name, degree in resolved.items() if isinstance(degree, int) and degree != 1} == {
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


@pytest.fixture
def launched(monkeypatch):
    """The environment of rank 1 of 2, without anybody behind it."""
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    for name in ("TCPStore", "init_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: pytest.fail("a process group was started"))


def test_degrees_are_checked_before_any_process_group(launched):
    """B144 and contract 9: 2 x 2 on two ranks fails in `build`, with both numbers, and nothing was started."""
    with pytest.raises(ConfigurationError, match=r"dp_replicate 2 x tp 2.*4.*2 ranks"):
        MeshStrategy(dp_replicate=2, tp=2).build()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pp": 2, "pipeline": "zbv", "stages_per_rank": 3}, r"'zbv' needs exactly 2 stages per rank, got 3.*interleaved_1f1b"),
        ({"pp": 2, "pipeline": "1f1b", "stages_per_rank": 2}, r"'1f1b' needs exactly 1 stage per rank, got 2"),
        ({"pp": 2, "stages_per_rank": 2}, r"'1f1b' needs exactly 1 stage per rank"),
        ({"pipeline": "1f1b"}, r"pipeline='1f1b'.*no effect with pp=1"),
        ({"stages_per_rank": 1}, r"stages_per_rank=1.*no effect with pp=1"),
        ({"context_attention": "ring"}, r"context_attention='ring'.*no effect without context ranks"),
        ({"pp": 3}, r"pp 3.*2 ranks"),
    ],
)
def test_stages_that_do_not_fit_are_refused(launched, options, words):
    """Contracts 9, 22 and 45: before anything was started."""
    with pytest.raises(ConfigurationError, match=words):
        MeshStrategy(**options).build()


def test_a_schedule_that_splits_needs_fsdp_per_pack(launched, monkeypatch):
    """Contract 23: before anything was started; other schedules do not split, and without shards there is nothing to reduce."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    for schedule in ("zb1p", "zbv", "dualpipe_v"):
        with pytest.raises(ConfigurationError, match=rf"pipeline='{schedule}'.*fsdp_sync='pack'"):
            MeshStrategy(pp=2, dp_shard=2, dp_replicate=1, pipeline=schedule).build()
    for options in ({"fsdp_sync": "pack", "dp_shard": 2, "pipeline": "zbv"}, {"dp_shard": 2}, {"dp_replicate": 2, "pipeline": "zbv"}):
        strategy = MeshStrategy(pp=2, **({"dp_replicate": 1} | options))
        strategy._check_effect(strategy.resolve(4), Place(1, 4, 1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline": "1f1bb"}, r"pipeline='1f1bb'\): there is no pipeline schedule '1f1bb'; did you mean '1f1b'\?"),
        ({"pipeline": "x"}, r"valid names: 1f1b, dualpipe_v, gpipe, interleaved_1f1b, looped_bfs, zb1p, zbv$"),
        ({"pipeline": "forward_only_v"}, r"'forward_only_v' has no backwards; choose one that trains"),
        ({"stages_per_rank": 0}, r"stages_per_rank=0"),
    ],
)
def test_a_pipeline_that_there_is_not_is_refused_at_once(options, words):
    with pytest.raises(ConfigurationError, match=words):
        MeshStrategy(pp=2, **options)


def test_names_of_schedules_may_be_written_otherwise():
    """Two scripts that mean the same schedule have the same settings."""
    assert MeshStrategy(pp=2, pipeline="Interleaved-1F1B").pipeline == "interleaved_1f1b" and MeshStrategy(pp=2).schedule == "1f1b"


def test_a_field_without_effect_is_refused_or_told(launched, monkeypatch, caplog):
    """Contract 45: `fsdp_sync` where nothing is sharded; told only, where the world decides it."""
    with pytest.raises(ConfigurationError, match=r"fsdp_sync='pack'.*nothing is sharded"):
        MeshStrategy(fsdp_sync="pack").build()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    MeshStrategy(dp_shard=-1, fsdp_sync="pack", backend="gloo", device="cpu").build()
    assert "fsdp_sync='pack'" in caplog.text and "backend='gloo'" in caplog.text
    with pytest.raises(ConfigurationError, match=r"ep=2.*no effect on one rank"):
        MeshStrategy(ep=2).build()


def test_a_wrong_word_is_refused():
    with pytest.raises(ConfigurationError, match=r"fsdp_sync='step'"):
        MeshStrategy(fsdp_sync="step")


@pytest.mark.parametrize(("local_rank", "expected"), [(0, 0), (3, 3)])
def test_each_rank_has_the_device_of_its_local_rank(monkeypatch, local_rank, expected):
    """Design decision 16: whatever the accelerator is; it becomes the current one before anything is made on it."""
    current = pretend_accelerators(monkeypatch, 4)
    assert _device_of_rank(None, Place(7, 8, local_rank, 1)) == torch.device("xpu", expected) and current == [expected]


def test_a_device_with_an_index_is_taken_as_it_is(monkeypatch):
    """B144."""
    current = pretend_accelerators(monkeypatch, 1)
    assert _device_of_rank("xpu:0", Place(1, 2, 1)) == torch.device("xpu", 0) and current == [0]
    assert _device_of_rank("cpu", Place(1, 2, 1)) == torch.device("cpu")


def test_more_processes_than_devices_say_the_numbers(monkeypatch):
    pretend_accelerators(monkeypatch, 2)
    with pytest.raises(ConfigurationError, match=r"local rank 3.*xpu devices here is 2"):
        _device_of_rank(None, Place(3, 4, 3))


def pretend_accelerators(monkeypatch, count: int) -> list[int]:
    current: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    return current


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
