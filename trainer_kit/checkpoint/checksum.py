"""CRC-32 in a second thread, beside the thread that reads or writes; and the test of a checkpoint's files by size and checksum.

`zlib.crc32` releases the interpreter lock, so checksum and input/output overlap. The queue is short: it bounds the memory that
temporary copies hold.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Mapping
from types import TracebackType

from trainer_kit.checkpoint.checks import FileRecord
from trainer_kit.exceptions import CheckpointError
from trainer_kit.storage import Folder, read_into
from trainer_kit.weights.regions import PIECE_BYTES

QUEUE_DEPTH = 2


class Checksum:
    """The CRC-32 of the bytes added so far. Use it as a context manager: leaving it ends the thread."""

    def __init__(self) -> None:
        self._queue: queue.Queue[memoryview | None] = queue.Queue(QUEUE_DEPTH)
        self._value = 0
        self._thread = threading.Thread(target=self._run, name="checkpoint-crc32", daemon=True)

    def __enter__(self) -> Checksum:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.finish()

    def add(self, data: memoryview) -> None:
        """Append bytes. They must not change until QUEUE_DEPTH + 1 more pieces were added, or `finish` was called."""
        self._queue.put(data)

    def finish(self) -> int:
        """Wait for the thread and return the checksum."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        return self._value

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            self._value = zlib.crc32(data, self._value)


DAMAGED = "the checkpoint is damaged, resume from an earlier one"


def check_sizes(folder: Folder, files: Mapping[str, FileRecord], if_missing: str = DAMAGED) -> None:
    """Raise CheckpointError, naming the file, if one is missing or has another size. Cheap: no data is read."""
    for name, record in files.items():
        try:
            size = folder.size(name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder.path(name)} is missing; {if_missing}") from error
        if size != record.size:
            raise CheckpointError(
                f"{folder.path(name)} has {size} bytes, expected {record.size}; it was truncated or altered, resume from an earlier one"
            )


def check_checksums(folder: Folder, files: Mapping[str, FileRecord]) -> None:
    """Read every file once and raise CheckpointError, naming the file, if its checksum differs."""
    for name, record in files.items():
        found = file_checksum(folder, name)
        if found != record.crc32:
            raise CheckpointError(
                f"{folder.path(name)} was altered or damaged: its CRC-32 is {found:08x}, expected {record.crc32:08x}. "
                "Resume from an earlier checkpoint, or pass verify=False to load it all the same"
            )


def file_checksum(folder: Folder, name: str) -> int:
    """CRC-32 of a file, read in pieces."""
    buffers = [memoryview(bytearray(PIECE_BYTES)) for _ in range(QUEUE_DEPTH + 2)]  # one is being read, one summed, the rest wait
    with folder.open(name) as file, Checksum() as checksum:
        index = 0
        while count := read_into(file, buffers[index % len(buffers)]):
            checksum.add(buffers[index % len(buffers)][:count])
            index += 1
        return checksum.finish()
