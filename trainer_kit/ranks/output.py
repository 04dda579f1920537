"""What ranks print, shown where this process prints when that is not simply its standard output, as in a notebook's cell."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable


def shares_standard_output() -> bool:
    """Whether ranks can print where this process prints by inheriting its file descriptor."""
    try:
        return sys.stdout.fileno() == 1
    except (AttributeError, OSError, ValueError):  # no stream, or one that is no file: OSError includes io.UnsupportedOperation
        return False


class Relay:
    """Pipes from ranks to `sys.stdout`. Read by whoever waits for the ranks, so that no thread prints into the wrong cell."""

    def __init__(self) -> None:
        self._readers: dict[int, codecs.IncrementalDecoder] = {}
        self._unshown = ""  # read, while an interrupt kept it from being shown

    def open(self) -> int:
        """A file descriptor for one more rank to print to; the caller closes it."""
        reader, writer = os.pipe()
        self._readers[reader] = codecs.getincrementaldecoder("utf-8")("replace")
        return writer

    @property
    def readers(self) -> dict[int, Callable[[], bool]]:
        """For `collect`: what to read when, and whether more may come."""
        return {reader: lambda reader=reader: self._show(reader) for reader in self._readers}  # type: ignore[misc]

    def _show(self, reader: int) -> bool:
        data = os.read(reader, io.DEFAULT_BUFFER_SIZE)
        self._unshown += self._readers[reader].decode(data, final=not data)
        sys.stdout.write(self._unshown)
        self._unshown = ""
        sys.stdout.flush()
        return bool(data)

    def close(self) -> None:
        """Show what is left of ranks that have ended."""
        for reader in self._readers:
            os.set_blocking(reader, False)
            try:
                while self._show(reader):
                    pass
            except BlockingIOError:
                pass  # something that a rank left behind still holds the other end
            os.close(reader)
        self._readers = {}
