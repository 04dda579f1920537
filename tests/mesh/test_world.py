"""The life of process groups: taken over or started here, given back, started again; timeouts; a rank that restarts."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from tests.mesh.support import build
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import group_timeout


def job_take_over() -> list:
    import torch.distributed as dist

    default, before = dist.group.WORLD, group_timeout(dist.group.WORLD)
    context = build(setup_timeout=50.0)
    context.close()
    context.close()
    found = [dist.group.WORLD is default, group_timeout(default) == before]
    for wrong in ({"backend": "mpi"}, {"world_size": "4"}):
        if "world_size" in wrong:
            os.environ["WORLD_SIZE"] = wrong.pop("world_size")
        try:
            build(**wrong)
        except ConfigurationError as error:
            found.append(str(error))
    os.environ["WORLD_SIZE"] = "2"
    return [*found, build(backend="gloo").host.sum([1.0])]


def test_a_process_group_that_is_there_is_taken_over_and_left():
    """Its timeout comes back, and a backend or a launcher that does not fit is an error."""
    for found in run_on_ranks(2, job_take_over):
        assert found[:2] == [True, True] and found[4] == [2.0]
        assert re.search(r"backend='mpi'.*gloo.*leave backend out", found[2])
        assert re.search(r"WORLD_SIZE=4.*says 2", found[3])


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def job_start(hosted_by: str) -> list:
    import torch.distributed as dist

    context = build()
    if hosted_by == "rank 0":  # "agent": the parent, whose store outlives the groups as that of torchrun's agent does
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        os.environ["MASTER_PORT"] = str(context.host.broadcast(free_port()))
    dist.destroy_process_group()
    found = []
    for _ in range(2):
        context = build(dp_shard=2)
        context.mesh_for("dense")
        found += [context.host.sum([1.0]), dist.get_backend()]
        with context.failures.section():
            context.host.agree("fit()")
        context.close()
        context.close()
        found.append(dist.is_initialized())
    return found


def test_a_started_process_group_is_destroyed_and_can_be_started_again():
    """Contract 42: whoever hosts the store, whose keys of the first time are still there."""
    for hosted_by in ("agent", "rank 0"):
        for found in run_on_ranks(2, job_start, hosted_by):
            assert found == [[2.0], "gloo", False] * 2


def job_timeouts() -> list:
    import torch.distributed as dist

    context = build(setup_timeout=100.0, step_timeout=7.0, dp_shard=2)
    background = context.host.for_background()
    groups = [dist.group.WORLD, context.mesh_for("dense").get_group("tp"), context.host._group, background]

    def now() -> list[float]:
        return [group_timeout(group).total_seconds() for group in groups]

    found = [now()]
    with context.short_timeout():
        found.append(now())
        with context.long_timeout():
            found.append(now())
        found.append(now())
    found.append(now())
    context.close()
    return found


def test_timeouts_are_short_in_the_loop_and_long_around_it():
    for found in run_on_ranks(2, job_timeouts):
        long, short = [100.0, 100.0, 100.0, 7200.0], [7.0, 7.0, 7.0, 7200.0]
        assert found == [long, short, long, short, long]


class Skipping(nn.Module):
    """Leaves one layer out where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == self.skipped else layer(x)
        return x


def job_hang(what: str) -> str:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    context = build(step_timeout=0.5, dp_shard=2)
    model = Skipping()
    if what == "unit":
        for module in (*model.layers, model):
            fully_shard(module, mesh=context.mesh_for("dense")["dp_cp_shard"])
        model.skipped = 2 if context.rank == 1 else None
    try:
        with context.failures.section(), context.short_timeout():
            if what == "unit":
                model(torch.ones(2, 4))
                context.host.barrier()
            elif context.rank == 0:
                context.host.barrier()
            else:
                time.sleep(1.0)
    except RuntimeError as error:
        return "\n".join([str(error), *error.__notes__])
    finally:
        dist.destroy_process_group()  # a group in which a collective timed out is of no use any more
    return ""


def test_a_unit_that_one_rank_does_not_call_is_named():
    """Contract 4: the rank that calls it says where it waited."""
    text, _ = run_on_ranks(2, job_hang, "unit")
    assert "in the module 'layers.2'" in text and "under FSDP" in text and "within 0.5 s" in text


def test_a_host_collective_obeys_the_timeout_of_the_step():
    """B138: rank 0 alone in a collective of the hosts does not wait for half an hour."""
    waited, _ = run_on_ranks(2, job_hang, "host")
    assert "within 0.5 s" in waited and "if rank == 0" in waited


def test_a_failed_rank_is_restarted_by_torchrun():
    """B135 and torch's restart: the error is first in sight, both ranks end, and the new ones find each other and not the dead."""
    script = Path(__file__).parent / "failing_once.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "sum" in line) == ["attempt 1 rank 0: sum 2", "attempt 1 rank 1: sum 2"]
    assert "ValueError: bad sample 17" in done.stderr and "rank 1 failed: ValueError: bad sample 17" in done.stderr
