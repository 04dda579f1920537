"""A save that dies or fails at any of its file operations: earlier checkpoints load, the new one is whole or passed over."""

from __future__ import annotations

import warnings

import pytest
import torch

from trainer_kit.checkpoint import CheckpointFolder, CheckpointSaver, flatten_state, load, read_manifest
from trainer_kit.exceptions import CheckpointError

MAX_OPERATIONS = 60


def holds(path, nested):
    tensors, values = flatten_state(nested)
    targets = {name: torch.full_like(tensor, 99) for name, tensor in tensors.items()}
    assert load(path, targets) == values
    return all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())


def newest_step(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = folder.newest()
    return found and found.step


@pytest.mark.parametrize("first", [True, False], ids=["first save", "second save"])
def test_killed_at_every_operation(tmp_path, state, save, faulty_folder, killed, first):
    """B30; contract 26: the process is gone at operation k, nothing is cleaned up; then the run goes on and saves the step again."""
    outcomes = set()
    for k in range(MAX_OPERATIONS):
        folder = CheckpointFolder(tmp_path / str(k))
        if not first:
            save(folder.path_for(10), 10)
        target = faulty_folder(folder.path_for(20), k, dead=True)
        try:
            save(target, 20)
        except killed:
            outcome = newest_step(folder)
            assert outcome in (20, None if first else 10)
        else:
            outcome = "finished"
        assert first or holds(folder.path_for(10), state(10))
        if outcome in (20, "finished"):
            assert holds(folder.path_for(20), state(20))
        save(folder.path_for(20), 20)
        assert holds(folder.path_for(20), state(20)) and newest_step(folder) == 20
        outcomes.add(outcome)
        if outcome == "finished":
            break
    assert outcomes == {20, None if first else 10, "finished"}


def test_killed_at_every_operation_of_replacing_the_only_checkpoint(tmp_path, save, state, faulty_folder, killed):
    """B30: saving a step again never leaves a moment without a whole checkpoint of it."""
    old, new = {"w": torch.zeros(5), "version": 1}, {"w": torch.ones(5), "version": 2}
    found = []
    for k in range(MAX_OPERATIONS):
        folder = CheckpointFolder(tmp_path / str(k))
        path = folder.path_for(20)
        save(path, 20, old)
        target = faulty_folder(path, k, dead=True)
        try:
            save(target, 20, new)
        except killed:
            pass
        assert newest_step(folder) == 20
        version = read_manifest(path).values["version"]
        assert holds(path, old if version == 1 else new)
        found.append(version)
        if target.count <= k:
            break
    assert found == sorted(found) and set(found) == {1, 2}
    assert sorted(p.name for p in (tmp_path / str(k) / "step-00000020").iterdir()) == ["manifest.json", "rank-00000-2.safetensors"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("replace", [False, True], ids=["new", "replace"])
def test_failed_at_every_operation(tmp_path, state, save, faulty_folder, asynchronous, replace):
    """Contract 31, B30: the error is told, what was written half is removed, a retry works."""
    for k in range(MAX_OPERATIONS):
        folder = CheckpointFolder(tmp_path / str(k))
        save(folder.path_for(10), 10)
        if replace:
            save(folder.path_for(20), 20)
        target = faulty_folder(folder.path_for(20), k, OSError(5, "Input/output error"))
        saver = CheckpointSaver()
        tensors, values = flatten_state(state(21))
        try:
            saver.save(target, tensors, values, step=20, asynchronous=asynchronous)
            saver.wait()
        except CheckpointError as error:
            assert "step 20" in str(error) and isinstance(error.__cause__, OSError)
            left = sorted(p.name for p in (tmp_path / str(k)).glob("step-00000020/*"))
            valid = [saved.step for saved in folder.list_valid()]
            assert valid == ([10, 20] if replace or "manifest.json" in left else [10])
            assert "manifest.json" in left or not (tmp_path / str(k) / "step-00000020").exists()
        if target.count <= k:
            break
        assert holds(folder.path_for(10), state(10))
        saver.save(folder.path_for(20), tensors, values, step=20)
        assert holds(folder.path_for(20), state(21))
    else:
        pytest.fail("the save never finished")


def test_killed_at_every_operation_of_a_removal(tmp_path, save, state, faulty_folder, killed):
    """Contract 29: what was being removed is gone or removable, never a damaged checkpoint; the newest is untouched."""
    for k in range(MAX_OPERATIONS):
        url = tmp_path / str(k)
        for step in (10, 20):
            save(CheckpointFolder(url).path_for(step), step)
        faulty = _Inside(faulty_folder, url, k)
        try:
            CheckpointFolder(faulty).retain(keep_last=1)
            done = True
        except killed:
            done = False
        folder = CheckpointFolder(url)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert folder.newest().step == 20
        assert [saved.step for saved in folder.list_valid()] in ([10, 20], [20])
        folder.retain(keep_last=1)
        assert not list(url.glob("step-00000010/*"))
        folder.remove_incomplete()
        assert [p.name for p in url.iterdir()] == ["step-00000020"]
        assert holds(folder.path_for(20), state(20))
        if done:
            break
    else:
        pytest.fail("the removal never finished")


def _Inside(faulty_folder, url, k):
    """A folder whose sub-folders count their operations together with it."""

    class Shared(faulty_folder):
        def __truediv__(self, name):
            inner = Shared(f"{self.url}/{name}", self.fail_at, self.error, dead=True)
            inner.step = self.step
            return inner

    return Shared(url, k, dead=True)
