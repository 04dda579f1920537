"""Two hosts on one machine: network namespaces that see each other, and nothing else, through one virtual cable.

Only the network is apart; processes and files are those of the machine. Needs `ip` of iproute2 and the right to make namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator

INTERFACE = "cable"
ADDRESSES = ("10.77.0.1", "10.77.0.2")


class CanNotMake(Exception):
    """Why there are no namespaces here."""


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise CanNotMake(f"`ip {' '.join(arguments)}` says: {done.stderr.strip()}")
    return done.stdout


def remove(name: str) -> None:
    """The host with all that still runs on it; the cable goes too."""
    for pid in ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "delete", name)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """For each host the words that a command must begin with to run there. Raises CanNotMake."""
    if shutil.which("ip") is None:
        raise CanNotMake("the command `ip` of iproute2 is not installed")
    names = [f"tk{os.getpid()}{side}" for side in "ab"]
    ends = [f"{name}e" for name in names]
    with contextlib.ExitStack() as made:
        for name in names:
            ip("netns", "add", name)
            made.callback(remove, name)
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("-n", name, "link", "set", end, "name", INTERFACE)
            ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                ip("-n", name, "link", "set", device, "up")
        yield [["ip", "netns", "exec", name] for name in names]
