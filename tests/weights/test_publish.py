"""Complete or absent: an export is interrupted at every file operation, and every kind of reader finds the old or the new one."""

import errno
import io
import itertools
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from trainer_kit import storage
from trainer_kit.exceptions import CheckpointError
from trainer_kit.storage import Folder
from trainer_kit.weights import IdentityMapper, items_of, load_model_state, write_model_state

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES = list("abcdef")
FORMS = {"single": 1000, "three files": 24, "two files": 36}  # limits in bytes, for six tensors of 12


@pytest.fixture(autouse=True)
def _quick_flush(monkeypatch):
    """The tests kill processes, not machines: waiting for the disk would change nothing."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class KilledError(BaseException):
    """The process is gone: nothing that it still wanted to do happens."""


class Fault:
    """Breaks the k-th file operation: one failing call, or the end of everything."""

    def __init__(self, at, kill):
        self.at, self.kill, self.count = at, kill, 0

    def strike(self):
        self.count += 1
        if self.count == self.at or (self.kill and self.count > self.at):
            raise KilledError if self.kill else OSError(errno.ENOSPC, "No space left on device")

    def around(self, function):
        def call(*args, **kwargs):
            self.strike()
            return function(*args, **kwargs)

        return call


class BrittleFile(io.FileIO):
    """Writes half of the bytes when the fault strikes."""

    fault: Fault

    def write(self, data):
        try:
            self.fault.strike()
        except BaseException:
            super().write(data[: len(data) // 2])
            raise
        return super().write(data)


def break_disk(patch, fault):
    """Put the fault behind every operation that changes the local disk."""

    def opened(path, mode="r", buffering=-1):
        if "w" not in mode:
            return open(path, mode, buffering)
        fault.strike()
        file = BrittleFile(path, "wb")
        file.fault = fault
        return file

    patch.setattr(storage, "open", opened, raising=False)
    patch.setattr(os, "fsync", fault.around(lambda handle: None))
    for name in ("replace", "remove", "link"):
        patch.setattr(os, name, fault.around(getattr(os, name)))


def break_folder(patch, fault):
    """The same for a file system behind a URL: before each operation of the folder."""
    inner = Folder.open

    def opened(self, name, mode="rb"):
        if "w" in mode:
            fault.strike()
        return inner(self, name, mode)

    patch.setattr(Folder, "open", opened)
    for name in ("rename", "remove", "sync"):
        patch.setattr(Folder, name, fault.around(getattr(Folder, name)))


def export(folder, value, form):
    return write_model_state(folder, items_of({name: torch.full((3,), float(value)) for name in NAMES}), max_shard_size=FORMS[form])


def by_our_reader(folder):
    targets = {name: torch.full((3,), -1.0) for name in NAMES}
    load_model_state(folder, IdentityMapper(NAMES), targets)
    return {value for target in targets.values() for value in target.tolist()}


def by_another_tool(folder, first):
    """The set of all values in the folder, for a tool that looks for `first` first."""
    index, single = folder / INDEX, folder / SINGLE
    if single.exists() and (first == SINGLE or not index.exists()):
        tensors = load_file(single)
    else:
        weight_map = json.loads(index.read_text())["weight_map"]
        tensors = {name: load_file(folder / file)[name] for name, file in weight_map.items()}
    assert sorted(tensors) == NAMES
    return {value for tensor in tensors.values() for value in tensor.tolist()}


def check_complete(folder, had_old, new=(1.0,)):
    """Every kind of reader finds one whole export: the old one (0), or one of `new`."""
    if not had_old and not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        return
    for values in (by_our_reader(folder), by_another_tool(folder, SINGLE), by_another_tool(folder, INDEX)):
        assert len(values) == 1 and values <= {*new, *([0.0] if had_old else [])}


def interrupted(folder, breaker, kill, new, at, value=1):
    """Whether the fault struck."""
    fault = Fault(at, kill)
    with pytest.MonkeyPatch.context() as patch:
        breaker(patch, fault)
        try:
            export(folder, value, new)
        except KilledError:
            assert kill
        except CheckpointError as error:
            assert not kill and "No space left" in str(error) and str(folder) in str(error)
    return fault.count >= at


@pytest.mark.parametrize("kill", [True, False], ids=["kill", "error"])
@pytest.mark.parametrize("new", FORMS)
@pytest.mark.parametrize("old", [None, *FORMS])
def test_a_fault_at_every_file_operation(tmp_path, old, new, kill):
    """Contract 37. B30, B43."""
    for at in itertools.count(1):
        folder = tmp_path / str(at)
        if old:
            export(folder, 0, old)
        if not interrupted(folder, break_disk, kill, new, at):
            break
        check_complete(folder, had_old=old is not None)
        if not kill:
            assert not list(folder.glob("*.tmp"))
        files = export(folder, 1, new)
        assert sorted(path.name for path in folder.iterdir()) == sorted(files)
        assert by_our_reader(folder) == {1.0}
    assert at > 5


@pytest.mark.parametrize("kill", [True, False], ids=["kill", "error"])
@pytest.mark.parametrize(("old", "new"), list(itertools.product(("single", "three files"), repeat=2)))
def test_a_fault_at_every_operation_behind_a_url(old, new, kill):
    """Contract 37."""
    for at in itertools.count(1):
        url = f"memory://publish/{old}-{new}-{kill}-{at}"
        Folder(url).remove()
        export(url, 0, old)
        if not interrupted(url, break_folder, kill, new, at):
            break
        assert by_our_reader(url) in ({0.0}, {1.0})
        assert sorted(export(url, 1, new)) == Folder(url).names()
        assert by_our_reader(url) == {1.0}
    assert at > 3  # open, rename and sync at least


def half_published(folder):
    """Whether parts of a killed attempt stand beside the old export, under names that count."""
    names = {path.name for path in folder.iterdir()}
    return {SINGLE, INDEX} <= names or (SINGLE not in names and "old-" in (folder / INDEX).read_text())


@pytest.mark.parametrize("old", ["single", "three files"])
def test_a_second_kill_after_one_in_the_middle(tmp_path, old):
    """Contract 37: what a killed attempt left does not harm the next one, wherever that is killed."""

    for first in itertools.count(1):
        template = tmp_path / f"template-{first}"
        export(template, 0, old)
        assert interrupted(template, break_disk, True, "three files", first, value=1)
        if half_published(template):
            break
    for second in itertools.count(1):
        folder = tmp_path / str(second)
        shutil.copytree(template, folder)
        if not interrupted(folder, break_disk, True, "three files", second, value=2):
            break
        check_complete(folder, had_old=True, new=(1.0, 2.0))
    assert second > 5


def test_a_disk_without_hard_links(tmp_path, monkeypatch):
    """Contract 37."""

    def no_links(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    export(tmp_path, 0, "three files")
    files = export(tmp_path, 1, "three files")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    assert by_our_reader(tmp_path) == {1.0}


def test_a_full_disk_says_what_is_needed(tmp_path):
    """B43."""
    export(tmp_path, 0, "single")
    with pytest.MonkeyPatch.context() as patch:
        break_disk(patch, Fault(2, kill=False))
        with pytest.raises(CheckpointError, match=rf"{tmp_path}: .*No space left.* needs 72 bytes there \([\d,]+ are free\)"):
            export(tmp_path, 1, "single")
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert by_our_reader(tmp_path) == {0.0}


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    """B30."""

    def interrupt():
        raise KeyboardInterrupt

    item = items_of({"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(KeyboardInterrupt):
        write_model_state(tmp_path, [item[0], item[1]._replace(source=interrupt)], max_shard_size=4)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_clean_up_does_not_hide_the_first_error(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "remove", lambda path: (_ for _ in ()).throw(PermissionError("no removal here")))
        break_at_write = Fault(2, kill=False)
        patch.setattr(os, "fsync", break_at_write.around(lambda handle: None))
        with pytest.raises(CheckpointError, match="No space left") as caught:
            export(tmp_path, 1, "three files")
    assert "no removal here" in caught.value.__notes__[0]
