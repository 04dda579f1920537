"""Which checkpoint is the newest, and which are removed."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from trainer_kit.checkpoint import CheckpointFolder, load, newest_path
from trainer_kit.checkpoint import folder as folder_module
from trainer_kit.exceptions import CheckpointError, ConfigurationError


@pytest.fixture
def filled(tmp_path, save):
    """Make a folder with these steps."""

    def fill(*steps, url=None):
        folder = CheckpointFolder(url or tmp_path / "checkpoints")
        for step in steps:
            save(folder.path_for(step), step)
        return folder

    return fill


def steps(folder):
    return [saved.step for saved in folder.list_valid()]


def name(step):
    return f"step-{step:08d}"


@pytest.fixture
def read(monkeypatch):
    """The steps whose manifests are read."""
    found, original = [], folder_module.read_manifest

    def counted(folder):
        found.append(int(folder.url[-8:]))
        return original(folder)

    monkeypatch.setattr(folder_module, "read_manifest", counted)
    return found


def test_names_and_order(filled):
    folder = filled(100, 20, 123456789)
    assert folder.path_for(100).endswith("/checkpoints/step-00000100")
    assert folder.list_valid() == [(20, "step-00000020"), (100, "step-00000100"), (123456789, "step-123456789")]
    assert folder.newest() == (123456789, "step-123456789")


def test_an_absent_folder_has_no_checkpoint(tmp_path):
    folder = CheckpointFolder(tmp_path / "none")
    assert folder.newest() is None and folder.list_valid() == [] and folder.retain(keep_last=1) == []


@pytest.mark.parametrize("damage", ["no manifest", "truncated", "missing", "altered manifest", "renamed"])
def test_a_damaged_newest_is_passed_over_with_a_warning(filled, tmp_path, damage):
    """B23, contract 26: the one before is taken, the damaged one is named and stays."""
    folder, path = filled(10, 20), tmp_path / "checkpoints" / name(20)
    data, manifest = path / "rank-00000.safetensors", path / "manifest.json"
    if damage == "renamed":
        path = path.rename(path.parent / name(30))
    else:
        {
            "no manifest": manifest.unlink,
            "truncated": lambda: data.write_bytes(data.read_bytes()[:-1]),
            "missing": data.unlink,
            "altered manifest": lambda: manifest.write_bytes(manifest.read_bytes().replace(b"20", b"21")),
        }[damage]()
    with pytest.warns(UserWarning, match=f"passed over: .*{path.name}"):
        assert folder.newest() == (10, name(10))
    folder.retain(keep_last=1)
    assert steps(folder) == [10] and path.exists()
    if damage != "renamed":
        with pytest.raises(CheckpointError, match=str(path)):
            load(path, {}, strict=False)


def test_both_damaged_is_an_error_and_no_fresh_start(filled, tmp_path):
    """B23."""
    folder = filled(10, 20)
    (tmp_path / "checkpoints" / name(10) / "manifest.json").unlink()
    data = tmp_path / "checkpoints" / name(20) / "rank-00000.safetensors"
    data.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r'step-00000020/rank.*step-00000010.*resume="never"'):
        folder.newest()
    (tmp_path / "checkpoints" / name(20) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        folder.newest()


def test_a_single_damaged_checkpoint_is_an_error_but_a_killed_first_save_is_a_fresh_start(filled, tmp_path):
    """B23."""
    folder, path = filled(10), tmp_path / "checkpoints" / name(10)
    (path / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is missing"):
        folder.newest()
    (path / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="there is no other: .*step-00000010 has no manifest.json"):
        assert folder.newest() is None


def test_order_is_by_step_and_never_by_time(filled, tmp_path):
    """B31."""
    folder = filled(9900, 10000, 10100)
    for age, step in enumerate((9900, 10000, 10100)):
        os.utime(tmp_path / "checkpoints" / name(step), (10**9 - age, 10**9 - age))
    assert folder.retain(keep_last=2) == [name(9900)]
    assert steps(folder) == [10000, 10100]


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"keep_last": 1, "best": [name(10)]}, [10, 50]),
        ({"keep_last": 1}, [50]),
        ({"keep_last": 2, "best": [name(40), name(50)]}, [40, 50]),
        ({"keep_last": 9}, [10, 20, 30, 40, 50]),
        ({"keep_last": 1, "keep_every": 20}, [20, 40, 50]),
        ({"keep_last": 2, "keep_every": 30, "best": [name(10)]}, [10, 30, 40, 50]),
        ({"keep_last": None, "keep_every": 20}, [10, 20, 30, 40, 50]),
        ({"keep_last": 1, "best": [name(99)]}, [50]),
    ],
)
def test_kept_are_the_newest_the_best_and_every_nth(filled, options, kept):
    """B34, B33: the union, so that the newest is never swapped for the best; defined for 1. B27: a best that is gone is fine."""
    folder = filled(10, 20, 30, 40, 50)
    removed = folder.retain(**options)
    assert steps(folder) == kept
    assert removed == [name(step) for step in (10, 20, 30, 40, 50) if step not in kept]


@pytest.mark.parametrize("option", ["keep_last", "keep_every"])
def test_a_number_below_one_is_refused(filled, option):
    with pytest.raises(ConfigurationError, match=f"{option}= is 0, expected at least 1"):
        filled(1).retain(**{option: 0})


def test_a_failed_save_costs_no_old_checkpoint(filled, save, faulty_folder):
    """B33: retention follows a save that was durable, so that two remain."""
    folder = filled(10, 20)
    with pytest.raises(RuntimeError, match="step 30"):
        save(faulty_folder(folder.path_for(30), 6, OSError(5, "gone")), 30, on_saved=lambda: folder.retain(keep_last=2))
    assert steps(folder) == [10, 20]


def test_damaged_ones_do_not_count_as_kept(filled, tmp_path):
    """Contract 29: the newest valid one stays although a damaged one is newer."""
    folder = filled(10, 20, 30)
    (tmp_path / "checkpoints" / name(30) / "rank-00000.safetensors").unlink()
    folder.retain(keep_last=1)
    assert steps(folder) == [20] and (tmp_path / "checkpoints" / name(30)).exists()


def test_foreign_files_and_folders_stay(filled, tmp_path):
    """B37, contract 29: only folders that a save of ours made valid are removed, and in them only our files."""
    folder, path = filled(10, 20, 30), tmp_path / "checkpoints"
    (path / "notes.txt").write_text("x")
    (path / "my-model").mkdir()
    (path / "step-00000005").mkdir()
    (path / "step-00000005" / "manifest.json").write_text("{}")
    (path / "step-00000007").write_text("a file")
    (path / name(10) / "notes.txt").write_text("mine")
    folder.retain(keep_last=1)
    folder.remove_incomplete()
    assert sorted(p.name for p in path.iterdir()) == ["my-model", "notes.txt", "step-00000005", "step-00000007", name(10), name(30)]
    assert [p.name for p in (path / name(10)).iterdir()] == ["notes.txt"]


def test_retention_reads_the_newest_and_what_goes(filled, save, read):
    """The cost of a save does not grow with the number of checkpoints that are kept."""
    folder = filled(*range(1, 10))
    assert folder.retain(keep_last=9) == [] and read == []
    assert folder.retain(keep_last=3, keep_every=2, best=[name(1)]) == [name(3), name(5)]
    assert sorted(read) == [3, 5, 7, 8, 9]
    read.clear()
    save(folder.path_for(10), 10)
    assert folder.retain(keep_last=3, keep_every=2, best=[name(1)]) == [name(7)]
    assert sorted(read) == [7, 10]
    assert steps(folder) == [1, 2, 4, 6, 8, 9, 10]


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "shorter manifest"])
def test_one_that_was_damaged_after_it_was_seen_does_not_count_as_kept(filled, tmp_path, save, damage):
    """Contract 29."""
    folder = filled(10, 20, 30)
    folder.retain(keep_last=2)
    path = tmp_path / "checkpoints" / name(30)
    data, manifest = path / "rank-00000.safetensors", path / "manifest.json"
    {
        "truncated": lambda: data.write_bytes(data.read_bytes()[:-1]),
        "missing": data.unlink,
        "no manifest": manifest.unlink,
        "shorter manifest": lambda: manifest.write_bytes(manifest.read_bytes()[:-1]),
    }[damage]()
    save(folder.path_for(40), 40)
    assert folder.retain(keep_last=2) == []
    assert steps(folder) == [20, 40] and path.exists()


def test_one_that_was_saved_again_counts_as_kept(filled, save):
    folder = filled(10, 20, 30)
    folder.retain(keep_last=2)
    save(folder.path_for(20), 20, {"model": {"other": torch.zeros(99)}})
    save(folder.path_for(30), 30)
    assert folder.retain(keep_last=2) == [] and steps(folder) == [20, 30]


def test_setting_aside_reads_only_what_lies_ahead(filled, tmp_path, read):
    folder = filled(10, 20, 30, 40)
    (tmp_path / "checkpoints" / name(30) / "manifest.json").unlink()  # under way, perhaps: it stays
    assert folder.set_aside(after=20) == [f"previous-1-{name(40)}"]
    assert read == [30, 40]
    assert folder.find_newest() == ((20, name(20)), [f"{folder.path_for(30)} has no manifest.json: it is incomplete, or no training "
        "checkpoint; expected a folder such as step-00000100"], False)  # fmt: skip


def test_the_newest_is_found_without_reading_the_older_ones(filled, read):
    folder = filled(10, 20, 30)
    assert folder.find_newest() == ((30, name(30)), [], False) and read == [30]


def test_the_newest_of_several_folders(filled, tmp_path):
    """B23: a folder in which nothing can be resumed is passed over while another one can; without any it is an error."""
    first, second, empty = filled(10, 20, url=tmp_path / "a"), filled(5, url=tmp_path / "b"), CheckpointFolder(tmp_path / "c")
    assert newest_path([second, first, empty]) == first.path_for(20)
    for step in (10, 20):
        (tmp_path / "a" / name(step) / "manifest.json").unlink()
    with pytest.warns(UserWarning) as caught:
        assert newest_path([first, second, empty]) == second.path_for(5)
    texts = [str(warning.message).split(" has no manifest.json")[0] for warning in caught]
    assert texts == [f"checkpoint passed over: {first.path_for(step)}" for step in (20, 10)]
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*/a can be resumed: .*step-00000020.*step-00000010"):
        newest_path([first, empty])
    assert newest_path([empty]) is None and newest_path([]) is None


def test_killed_first_saves_in_several_folders_are_a_fresh_start(filled, tmp_path):
    folders = [filled(10, url=tmp_path / "a"), filled(10, url=tmp_path / "b")]
    for letter in "ab":
        (tmp_path / letter / name(10) / "manifest.json").unlink()
    with pytest.warns(UserWarning) as caught:
        assert newest_path(folders) is None
    texts = [str(warning.message).split(" has no manifest.json")[0] for warning in caught]
    assert texts == [f"checkpoint passed over, there is no other: {folder.path_for(10)}" for folder in folders]


def test_incomplete_folders_ahead_of_the_newest_valid_one_stay(filled, tmp_path):
    """Contract 26: another job may be saving there."""
    folder = filled(10, 20, 30, 40)
    for step in (10, 40):
        (tmp_path / "checkpoints" / name(step) / "manifest.json").unlink()
    assert folder.remove_incomplete() == [name(10)]
    for step in (20, 30):
        (tmp_path / "checkpoints" / name(step) / "manifest.json").unlink()
    assert folder.remove_incomplete() == []  # nothing valid: nothing is known to be older
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [name(20), name(30), name(40)]


def test_incomplete_folders_go_only_when_asked(filled, tmp_path, save, faulty_folder, killed):
    """B30, contract 26: retention leaves them (somebody may be writing there), `remove_incomplete` takes them."""
    folder = filled(10, 30)
    with pytest.raises(killed):
        save(faulty_folder(folder.path_for(20), 6, dead=True), 20)
    folder.retain(keep_last=1)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [name(20), name(30)]
    assert folder.remove_incomplete() == [name(20)]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [name(30)]


def test_what_somebody_else_removed_is_fine(filled):
    """B35: several processes keep one each, at the same time, in the same folder."""
    folder = filled(*range(1, 9))
    errors: list[BaseException] = []

    def act():
        try:
            CheckpointFolder(folder.path_for(0).rsplit("/", 1)[0]).retain(keep_last=1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=act) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and steps(folder) == [8]


def test_remote_folders(filled, tmp_path, state):
    """B39: save, list, rotate, load behind a URL."""
    folder = filled(10, 20, 30, url=f"memory://{tmp_path.name}/run")
    assert folder.path_for(10) == f"memory://{tmp_path.name}/run/step-00000010"
    assert folder.retain(keep_last=2) == [name(10)]
    assert steps(folder) == [20, 30] and folder.newest().step == 30
    weight = torch.zeros(3, 4)
    load(folder.path_for(30), {"model/weight": weight}, strict=False)
    assert torch.equal(weight, state(30)["model"]["weight"])
    with pytest.raises(ConfigurationError, match="nosuch"):
        CheckpointFolder("nosuch://x/y")
