"""Where a process stands, from what launchers set; and what is said when they set only a part."""

import pytest

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.place import Place, find_place

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "29500",
}  # fmt: skip


def test_no_launcher_is_one_process():
    """Contract 10."""
    assert find_place({}) == Place(0, 1, 0, 0)
    assert find_place({"WORLD_SIZE": "1", "RANK": "0"}) == Place(0, 1, 0, 0)


def test_torchrun_says_everything():
    assert find_place(TORCHRUN) == Place(rank=5, world_size=8, local_rank=1, node=1)


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_part_that_is_missing_is_named(missing):
    with pytest.raises(ConfigurationError, match=rf"WORLD_SIZE=8 is set but {missing} is not.*torchrun"):
        find_place({name: value for name, value in TORCHRUN.items() if name != missing})


def test_a_rank_without_a_world_is_refused():
    """Half a launcher: training alone would give every process the same data."""
    with pytest.raises(ConfigurationError, match=r"RANK=5 is set but WORLD_SIZE is not"):
        find_place({"RANK": "5", "LOCAL_RANK": "1"})
    with pytest.raises(ConfigurationError, match=r"RANK, MASTER_ADDR, MASTER_PORT are not"):
        find_place({"WORLD_SIZE": "2", "LOCAL_RANK": "0"})


@pytest.mark.parametrize(("name", "value", "words"), [("RANK", "8", "from 0 to 7"), ("WORLD_SIZE", "many", "expected a number")])
def test_numbers_that_cannot_be_are_refused(name, value, words):
    with pytest.raises(ConfigurationError, match=rf"{name}='?{value}'?.*{words}"):
        find_place(TORCHRUN | {name: value})
