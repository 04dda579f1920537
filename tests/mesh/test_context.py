"""The place of a process: its ranks, and the losses that modules add during a forward."""

import pytest
import torch

from trainer_kit import DistributedContext, MeshStrategy
from trainer_kit.exceptions import StateError
from trainer_kit.mesh.place_logger import PlaceLogger


def context(**places) -> DistributedContext:
    return DistributedContext(strategy=MeshStrategy(), device=torch.device("cpu"), **places)


def test_one_process_is_the_main_one():
    """Contract 10."""
    assert context().is_main and not context(rank=1, world_size=2).is_main
    assert context().describe() == "1 process on cpu" and context(world_size=4).describe() == "4 ranks on cpu"


def test_one_process_opens_nothing(monkeypatch):
    """Contract 10 and B136: no port, no store, no group, so that any number of runs fit on a machine."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name in ("TCPStore", "init_process_group", "new_group"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: pytest.fail("something was opened"))
    place = MeshStrategy(device="cpu").build()
    with place.failures.section(), place.long_timeout(), place.short_timeout(), place.main_process_first():
        place.host.agree("fit()")
    assert place.group("batch", "dp") is None and place.data_group is None
    assert place.dense_sizes() == {"dp_replicate": 1, "dp_cp_shard": 1, "cp_replicate": 1, "tp": 1}
    assert place.is_counted and (place.local_rank, place.node, place.tensor_rank, place.num_tensor_ranks) == (0, 0, 0, 1)
    place.close()
    place.close()


def test_one_process_logs_without_a_place(caplog):
    context().logger.warning("%d steps", 3)
    assert caplog.messages == ["3 steps"] and caplog.records[0].name == "trainer_kit"


def test_a_rank_logs_with_its_coordinates(caplog):
    PlaceLogger(3, {"dp": 1, "tp": 1}).warning("%d steps", 3)
    PlaceLogger(3, {}).warning("done")
    assert caplog.messages == ["[rank 3: dp 1, tp 1] 3 steps", "[rank 3] done"] and caplog.records[0].name == "trainer_kit"


def test_one_process_has_no_mesh():
    """Contract 10: a component that needs one is told to look first."""
    with pytest.raises(StateError, match=r"'dense'.*world_size > 1"):
        context().mesh_for("dense")


def test_added_losses_are_taken_once_in_order():
    """Those of one name add up; outside of a forward nothing is collected."""
    place = context()
    place.add_loss("outside", torch.ones(()))
    place.collect_losses()
    for name, value, coefficient in (("router", 1.0, 0.5), ("z", 2.0, 1.0), ("router", 4.0, 0.5), ("z", 8.0, 3.0)):
        place.add_loss(name, torch.tensor(value), coefficient)
    taken = place.take_losses()
    assert [(added.name, added.value.item(), added.coefficient) for added in taken] == [("router", 5.0, 0.5), ("z", 26.0, 1.0)]
    place.add_loss("outside", torch.ones(()))
    assert place.take_losses() == []


def test_two_contexts_share_nothing():
    one, other = context(), context()
    one.collect_losses()
    one.add_loss("router", torch.ones(()))
    assert other.take_losses() == []
