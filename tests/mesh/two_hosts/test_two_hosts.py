"""torchrun over two hosts: one run on a mesh across them, one killed rank, one restart that goes on by itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mesh.two_hosts.hosts import ADDRESSES, INTERFACE, CanNotMake, two_hosts
from tests.mesh.two_hosts.training import NUM_STEPS, SAVE_EVERY, train
from trainer_kit.testing import run_on_ranks

REPOSITORY = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("training.py")
RESUMED_AT = 2 * SAVE_EVERY


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    with contextlib.ExitStack() as stack:
        try:
            commands = stack.enter_context(two_hosts())
        except CanNotMake as why:
            pytest.skip(f"two hosts on this machine can't be made: {why}")
        yield commands


def torchrun(hosts: list[list[str]], *arguments: str) -> list[str]:
    """The script on both hosts, one rank on each; what the launchers and ranks of each host printed."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    launchers = []
    for node, (host, address) in enumerate(zip(hosts, ADDRESSES, strict=True)):
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400", f"--rdzv-conf=is_host={node == 0}"]
        options = [*meeting, f"--local-addr={address}", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.2"]
        command = [*host, sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), *arguments]
        launchers.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        printed = [launcher.communicate(timeout=120.0)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n\n".join(printed)
    return printed


def starts(folder: Path) -> list[list[list[int]]]:
    return [[json.loads(line) for line in (folder / f"starts-{rank}.jsonl").read_text().splitlines()] for rank in range(2)]


def test_a_run_over_two_hosts_goes_on_after_a_killed_rank(hosts, tmp_path):
    """Contracts 26 and 41, B140: bitwise the weights of a run that nothing disturbed."""
    degrees = {"dp_shard": 2}
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    disturbed.mkdir(), undisturbed.mkdir()
    printed = torchrun(hosts, str(disturbed), json.dumps(degrees))
    assert "exitcode: -9" in printed[1], "the launcher of the second host saw its rank killed"
    assert starts(disturbed) == [[[0, node, 2], [RESUMED_AT, node, 2]] for node in range(2)]
    run_on_ranks(2, train_undisturbed, undisturbed, degrees)
    assert starts(undisturbed) == [[[0, 0, 2]]] * 2
    files = [folder / "model" / "model.safetensors" for folder in (disturbed, undisturbed)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(list((disturbed / "checkpoints").iterdir())) == NUM_STEPS // SAVE_EVERY


def train_undisturbed(folder: Path, degrees: dict[str, int]) -> None:
    train(folder, degrees, dies=False)
