"""One folder, local or behind a URL: the same operations with the same results."""

import os

import pytest

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.storage import Folder, flush, read_into, write_all


@pytest.fixture(params=["local", "file://", "memory://"])
def folder(request, tmp_path):
    """An absent folder of each kind."""
    return Folder({"local": tmp_path / "a", "file://": f"file://{tmp_path}/a", "memory://": f"memory://{tmp_path.name}/a"}[request.param])


def test_the_life_of_a_folder(folder):
    """B39: the same for a path and for a URL."""
    assert not folder.exists() and folder.names() == []
    folder.make()
    folder.make()
    folder.write_durably("b.json", b"{}")
    with folder.open("a.bin", "wb") as file:
        write_all(file, memoryview(bytes(range(100))).cast("B", (10, 10)))
        flush(file)
    assert folder.names() == ["a.bin", "b.json"] and folder.exists("a.bin")
    assert folder.size("a.bin") == 100 and folder.read("a.bin") == bytes(range(100))
    folder.rename("a.bin", "b.json")
    assert folder.names() == ["b.json"] and folder.read("b.json") == bytes(range(100))
    folder.remove("b.json")
    folder.remove("b.json")
    folder.sync()
    assert folder.names() == []


def test_folders_inside_a_folder(folder):
    inner = folder / "step-00000001"
    inner.make()
    inner.write_durably("x", b"1")
    folder.write_durably("y", b"2")
    assert folder.names() == ["step-00000001", "y"]
    assert folder.is_folder("step-00000001") and not folder.is_folder("y") and not folder.is_folder("z")
    folder.rename("step-00000001", "step-00000002")
    assert (folder / "step-00000002").read("x") == b"1"
    folder.remove("step-00000002")
    assert folder.names() == ["y"] and not inner.exists()


def test_a_part_of_a_file_is_read_into_memory(folder):
    folder.make()
    folder.write_durably("x", bytes(range(50)))
    buffer = bytearray(20)
    with folder.open("x") as file:
        file.seek(40)
        assert read_into(file, memoryview(buffer)) == 10
    assert bytes(buffer) == bytes(range(40, 50)) + bytes(10)


def test_a_url_stays_a_url():
    """B39: `memory://x` never becomes `memory:/x`; a trailing slash means nothing."""
    folder = Folder("memory://x/y/")
    assert folder.path("z") == "memory://x/y/z" and (folder / "z").url == "memory://x/y/z" and not folder.is_local


def test_a_path_is_made_absolute_when_it_is_given(tmp_path, monkeypatch):
    """A script that changes its directory afterwards saves where it said."""
    monkeypatch.chdir(tmp_path)
    folder = Folder("runs")
    monkeypatch.chdir("/")
    assert folder.path("a") == f"{tmp_path}/runs/a"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Folder("~/runs").url == f"{tmp_path}/runs"


@pytest.mark.parametrize(("url", "words"), [("", "empty"), ("nowhere://x", "nowhere://.*local path"), ("adl2://x", "adl2://")])
def test_what_is_no_folder_is_refused_with_its_scheme(url, words):
    """B39: before the training begins."""
    with pytest.raises(ConfigurationError, match=words):
        Folder(url)


def test_an_unfinished_durable_write_leaves_the_old_content(tmp_path, monkeypatch):
    """B30: temporary name, flush, rename; the name alone says that the file is whole."""
    folder = Folder(tmp_path)
    folder.write_durably("x", b"old")

    def fail(handle):
        raise OSError("gone")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="gone"):
        folder.write_durably("x", b"new and longer")
    assert folder.read("x") == b"old"


def test_a_durable_write_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch):
    """B30: bytes to the disk, then the rename, then the folder itself."""
    order = []
    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: order.append("fsync") or real_fsync(handle))
    monkeypatch.setattr(os, "replace", lambda old, new: order.append("rename") or real_replace(old, new))
    Folder(tmp_path).write_durably("x", b"data")
    assert order == ["fsync", "rename", "fsync"]


class Slow:
    """A file that takes and gives three bytes at a time."""

    def __init__(self):
        self.data, self.at = b"", 0

    def write(self, data):
        self.data += bytes(data[:3])
        return min(3, len(data))

    def readinto(self, buffer):
        part = self.data[self.at : self.at + min(3, len(buffer))]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)


class NoReadInto:
    """A remote file that only has `read`."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def read(self, count):
        part = self.data[self.at : self.at + min(count, 4)]
        self.at += len(part)
        return part


def test_short_writes_and_reads_are_gone_on_with():
    file, buffer = Slow(), bytearray(10)
    write_all(file, b"0123456789")
    assert file.data == b"0123456789"
    assert read_into(file, memoryview(buffer)) == 10 and bytes(buffer) == b"0123456789"
    assert read_into(NoReadInto(b"abcdef"), memoryview(buffer)) == 6 and bytes(buffer) == b"abcdef6789"


def test_removing_a_link_leaves_what_it_points_to(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    Folder(tmp_path).remove("link")
    assert sorted(os.listdir(tmp_path)) == ["data"] and (tmp_path / "data" / "x").exists()
