"""One folder, on a local disk or behind any fsspec URL, with the few operations that saving needs.

Local paths use the operating system directly: faster, and `fsync` and atomic `replace` mean something there. Everything that
trainer_kit writes for keeps (checkpoints, model states) goes through here, so a URL is never handled as a path.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import IO, Any

from trainer_kit.exceptions import ConfigurationError


class Folder:
    """A folder. `url` is a path, or an fsspec URL such as `memory://runs/a`; names inside use `/`.

    Raises ConfigurationError, naming the scheme, if fsspec has no such back-end or its package is missing.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        text = os.fspath(url)
        if not text:
            raise ConfigurationError("a folder was expected, found an empty path")
        scheme = text.split("://", 1)[0] if "://" in text else ""
        if scheme == "file":
            text, scheme = text[len("file://") :], ""
        self.url = text.rstrip("/") or "/"
        self.is_local = not scheme
        self._fs: Any = None
        if scheme:
            self._fs, self._root = self._remote(text, scheme)
        else:
            self._root = os.path.abspath(os.path.expanduser(text))
            self.url = self._root

    @staticmethod
    def _remote(url: str, scheme: str) -> tuple[Any, str]:
        import fsspec

        try:
            return fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            package = "trainer_kit[hf]" if scheme == "hf" else "the fsspec package of that scheme"
            raise ConfigurationError(
                f"no file system for {scheme}:// (in {url!r}): {error}. Use a local path, or install {package}"
            ) from error

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.url}/{name}")

    def __repr__(self) -> str:
        return f"Folder({self.url!r})"

    def path(self, name: str = "") -> str:
        """The full path or URL of a name, for messages."""
        return f"{self.url}/{name}" if name else self.url

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def make(self) -> None:
        """Create the folder and its parents."""
        if self.is_local:
            os.makedirs(self._root, exist_ok=True)
        else:
            self._fs.makedirs(self._root, exist_ok=True)

    def exists(self, name: str = "") -> bool:
        """Whether the folder, or something of this name in it, is there."""
        return os.path.exists(self._at(name)) if self.is_local else bool(self._fs.exists(self._at(name)))

    def is_folder(self, name: str) -> bool:
        """Whether `name` is a folder inside this one."""
        return os.path.isdir(self._at(name)) if self.is_local else bool(self._fs.isdir(self._at(name)))

    def names(self) -> list[str]:
        """Sorted names of the files and folders directly inside; empty if the folder is absent."""
        if self.is_local:
            return sorted(os.listdir(self._root)) if os.path.isdir(self._root) else []
        if not self._fs.exists(self._root):
            return []
        return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in self._fs.ls(self._root, detail=False))

    def refresh(self) -> None:
        """Forget what a file system behind a URL remembers of it: other processes may have written there."""
        if not self.is_local:
            self._fs.invalidate_cache(self._root)

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return os.path.getsize(self._at(name)) if self.is_local else int(self._fs.size(self._at(name)))

    def open(self, name: str, mode: str = "rb") -> IO[Any]:
        """Open a file, binary and unbuffered for local reads and writes."""
        if self.is_local:
            return open(self._at(name), mode, buffering=0 if "b" in mode else -1)
        return self._fs.open(self._at(name), mode)

    def write_durably(self, name: str, data: bytes) -> None:
        """Write a small file whole: under a temporary name, flushed, then renamed; its presence means that it is complete."""
        temporary = f"{name}.tmp"
        with self.open(temporary, "wb") as file:
            write_all(file, data)
            flush(file)
        self.rename(temporary, name)
        self.sync()

    def read(self, name: str) -> bytes:
        """A whole file."""
        with self.open(name) as file:
            return file.read()

    def read_object(self, name: str, error: type[Exception]) -> dict[str, Any]:
        """A JSON file that holds an object; raises `error`, naming the file, for anything else."""
        try:
            content = json.loads(self.read(name))
        except (ValueError, RecursionError) as reason:
            raise error(f"{self.path(name)} is no JSON object: {reason}") from reason
        if not isinstance(content, dict):
            raise error(f"{self.path(name)} is no JSON object: it holds a {type(content).__name__}")
        return content

    def rename(self, old: str, new: str) -> None:
        """Move inside the folder, replacing `new`."""
        if self.is_local:
            os.replace(self._at(old), self._at(new))
        else:
            self._fs.mv(self._at(old), self._at(new), recursive=self._fs.isdir(self._at(old)))

    def remove(self, name: str = "") -> None:
        """Remove a file, or a folder with all that it holds; absent is fine."""
        path = self._at(name)
        if not self.is_local:
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)
        elif os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.remove(path)

    def sync(self) -> None:
        """Make names durable: on a local disk, flush the folder itself."""
        if self.is_local:
            handle = os.open(self._root, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def flush(file: IO[Any]) -> None:
    """Bring the file's bytes to the disk, where the file system can."""
    file.flush()
    try:
        handle = file.fileno()
    except (OSError, AttributeError):  # remote and in-memory files have no descriptor: closing them commits
        return
    os.fsync(handle)


def write_all(file: IO[Any], data: bytes | memoryview) -> None:
    """Write every byte: an unbuffered file may take fewer at a time."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]


def read_into(file: IO[Any], buffer: memoryview) -> int:
    """Fill a writable buffer from the file's position; returns the bytes read, fewer only at the end of the file."""
    done = 0
    view = buffer.cast("B")
    while done < len(view):
        count = file.readinto(view[done:]) if hasattr(file, "readinto") else _read_copy(file, view[done:])
        if not count:
            break
        done += count
    return done


def _read_copy(file: IO[Any], view: memoryview) -> int:
    data = file.read(len(view))
    view[: len(data)] = data
    return len(data)
