"""When a save returns, what it copies, and where its outcome appears."""

from __future__ import annotations

import errno
import threading

import pytest
import torch

from trainer_kit.checkpoint import CheckpointFolder, CheckpointSaver, flatten_state, load, read_manifest
from trainer_kit.exceptions import CheckpointError
from trainer_kit.storage import Folder


class BlockedFolder(Folder):
    """Holds back every opened file until `release` is set; then raises `error`, if there is one."""

    def __init__(self, url, error=None):
        super().__init__(url)
        self.release, self.error, self.reached = threading.Event(), error, threading.Event()

    def open(self, name, mode="rb"):
        self.reached.set()
        assert self.release.wait(20)
        if self.error is not None:
            raise self.error
        return super().open(name, mode)


@pytest.fixture
def blocked(tmp_path):
    return lambda error=None, step=1: BlockedFolder(tmp_path / f"step-{step:08d}", error)


def loaded(path, **shapes):
    targets = {name: torch.zeros(shape) for name, shape in shapes.items()}
    load(path, targets)
    return {name: tensor.tolist() for name, tensor in targets.items()}


def test_the_state_is_copied_before_the_call_returns(blocked, tmp_path):
    """Contract 30: a CPU parameter changed right after the call, in the first save and in one that reuses the buffers."""
    saver, weight = CheckpointSaver(), torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    for step in (1, 2):
        folder = blocked(step=step)
        saver.save(folder, {"w": weight}, None, step=step, asynchronous=True)
        with torch.no_grad():
            weight.mul_(10)
        folder.release.set()
        saver.wait()
    assert loaded(tmp_path / "step-00000001", w=2) == {"w": [1, 2]}
    assert loaded(tmp_path / "step-00000002", w=2) == {"w": [10, 20]}


def test_on_saved_runs_in_the_calling_thread_after_the_checkpoint_is_durable(blocked, tmp_path, save):
    """B41, contract 29: while the save is under way, the old one is the newest and stays."""
    folder = CheckpointFolder(tmp_path)
    save(folder.path_for(1), 1)
    new, saver, seen = blocked(step=2), CheckpointSaver(), []

    def on_saved():
        seen.append((threading.current_thread(), folder.newest().step, folder.retain(keep_last=1)))

    saver.save(new, {"w": torch.ones(1)}, None, step=2, asynchronous=True, on_saved=on_saved)
    assert new.reached.wait(20)
    saver.poll()
    assert not seen and saver.in_flight
    assert folder.list_valid() == [(1, "step-00000001")]
    new.release.set()
    saver.wait()
    saver.poll()
    assert seen == [(threading.main_thread(), 2, ["step-00000001"])]
    assert not saver.in_flight


def test_poll_settles_a_save_that_has_ended(tmp_path):
    saver, seen = CheckpointSaver(), []
    saver.save(tmp_path / "c", {}, None, step=1, asynchronous=True, on_saved=lambda: seen.append(1))
    for thread in threading.enumerate():
        if thread.name == "checkpoint-save-1":
            thread.join()
    saver.poll()
    assert seen == [1]


def test_the_next_save_waits_for_the_one_in_flight(blocked, tmp_path):
    saver, first = CheckpointSaver(), blocked(step=1)
    saver.save(first, {"w": torch.ones(1)}, None, step=1, asynchronous=True)
    threading.Timer(0.05, first.release.set).start()
    saver.save(tmp_path / "step-00000002", {"w": torch.ones(1)}, None, step=2)
    assert [s.step for s in CheckpointFolder(tmp_path).list_valid()] == [1, 2]


def test_a_failure_surfaces_at_the_next_save(blocked, tmp_path):
    """B40, contract 30: with the original as cause; the save after that works."""
    saver, folder = CheckpointSaver(), blocked(cause := PermissionError(13, "Permission denied"))
    saver.save(folder, {"w": torch.ones(1)}, None, step=1, asynchronous=True, on_saved=lambda: pytest.fail("it was not saved"))
    folder.release.set()
    with pytest.raises(CheckpointError, match=r"saving step 1 to .*step-00000001 failed: PermissionError") as caught:
        saver.save(tmp_path / "c", {"w": torch.ones(1)}, None, step=2)
    assert caught.value.__cause__ is cause
    assert not (tmp_path / "step-00000001").exists()
    saver.save(tmp_path / "c", {"w": torch.ones(1)}, None, step=2)
    saver.close()


def test_a_failure_surfaces_at_close_but_never_hides_the_first_error(blocked):
    """B40, contract 30."""
    for error in (None, ValueError("the first one")):
        saver, folder = CheckpointSaver(), blocked(OSError(5, "gone"))
        saver.save(folder, {"w": torch.ones(1)}, None, step=1, asynchronous=True)
        folder.release.set()
        if error is None:
            with pytest.raises(CheckpointError, match="gone"):
                saver.close()
        else:
            saver.close(error)
            assert "a checkpoint was not saved" in error.__notes__[0] and "gone" in error.__notes__[0]
        saver.close()


def test_disk_full_names_the_folder_and_the_bytes(tmp_path, save, faulty_folder):
    """B43, contract 31: the one before stays loadable, the half of the new one is gone."""
    path = tmp_path / "step-00000001"
    save(path, 1, {"w": torch.ones(4)})
    for operation in range(2, 10):  # from the data file on to the manifest
        folder = faulty_folder(tmp_path / "step-00000002", operation, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(CheckpointError, match=r"step-00000002 failed: No space left.*needs about 16 bytes, \d+ are free.*keep_last="):
            save(folder, 2, {"w": torch.ones(4)})
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert loaded(path, w=4) == {"w": [1, 1, 1, 1]}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_inside_the_writer(tmp_path, save, blocked, asynchronous):
    """B46: it is not swallowed, and the folder is not left half written."""
    save(tmp_path / "step-00000001", 1)
    folder, saver = blocked(KeyboardInterrupt(), step=2), CheckpointSaver()
    folder.release.set()
    with pytest.raises(CheckpointError if asynchronous else KeyboardInterrupt) as caught:
        saver.save(folder, {"w": torch.ones(1)}, None, step=2, asynchronous=asynchronous)
        saver.wait()
    assert isinstance(caught.value.__cause__ if asynchronous else caught.value, KeyboardInterrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_an_interrupt_while_bytes_are_written_leaves_no_thread(tmp_path, save, faulty_folder):
    """B46."""
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        save(faulty_folder(tmp_path / "c", 6, KeyboardInterrupt()), 1)
    assert threading.active_count() == before
    assert not (tmp_path / "c").exists()


def test_state_may_appear_change_and_vanish_between_saves(tmp_path):
    """B47: buffers are reused by key, shape and dtype, nothing else is remembered."""
    saver = CheckpointSaver()
    small, double = {"a": torch.ones(2)}, {"a": torch.ones(4, dtype=torch.float64)}
    states = [small, {"a": torch.ones(2) * 2, "b": torch.ones(3)}, double, {"b": torch.ones(1)}]
    for step, state in enumerate(states):
        saver.save(tmp_path / str(step), state, None, step=step, asynchronous=True)
        saver.wait()
        assert set(read_manifest(tmp_path / str(step)).tensors) == set(state)
        targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        load(tmp_path / str(step), targets)
        assert all(torch.equal(targets[name], tensor) for name, tensor in state.items())


def test_the_second_save_reuses_the_copies_and_close_releases_them(tmp_path):
    saver, weight = CheckpointSaver(), torch.ones(8)
    places = []
    for step in range(2):
        saver.save(tmp_path / str(step), {"w": weight}, None, step=step, asynchronous=True)
        saver.wait()
        places.append(saver._staging._buffers["w"].data_ptr())
    assert places[0] == places[1]
    saver.close()
    assert not saver._staging._buffers


def test_several_ranks_write_one_checkpoint(tmp_path):
    """B21, contract 28: two ranks' plans through DCP's planner; replicated values once, shards side by side, read as one tensor."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    from trainer_kit.checkpoint.writer import CheckpointWriter

    full, both = torch.arange(10.0).view(5, 2), torch.full((3,), 7.0)

    class Rank(DefaultSavePlanner):
        def __init__(self, first, last):
            super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
            self.part = full[first:last]
            chunk = ChunkStorageMetadata(torch.Size([first, 0]), self.part.shape)
            data = TensorWriteData(chunk, TensorProperties(torch.float32), full.shape)
            self.shard = WriteItem(MetadataIndex("w", chunk.offsets), WriteItemType.SHARD, tensor_data=data)
            self.set_up_planner({"both": both}, is_coordinator=first == 0)

        def create_local_plan(self):
            return SavePlan([*super().create_local_plan().items, self.shard])

        def lookup_object(self, index):
            return both if index.fqn == "both" else self.part

    ranks, writer = [Rank(0, 3), Rank(3, 5)], CheckpointWriter(Folder(tmp_path / "c"), step=1)
    plans, metadata = ranks[0].create_global_plan([writer.prepare_local_plan(rank.create_local_plan()) for rank in ranks])
    plans = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, rank).wait() for plan, rank in zip(plans, ranks, strict=True)])
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    assert loaded(tmp_path / "c", w=(5, 2), both=3) == {"w": full.tolist(), "both": both.tolist()}


def test_only_tensors_pass_through_the_planner(tmp_path):
    """Promise 5: what is no tensor would be pickled by DCP; it is refused."""
    from trainer_kit.checkpoint.writer import CheckpointWriter, write_checkpoint

    with pytest.raises(CheckpointError, match="callbacks/x: only tensors"):
        write_checkpoint(CheckpointWriter(Folder(tmp_path / "c"), step=1), {"callbacks/x": {"a": 1}})
    assert not (tmp_path / "c").exists()


def test_values_and_identity_are_kept(tmp_path, save, state):
    identity = {"run_name": "a", "seed": 2**70, "settings": {"lr": float("inf"), "mesh": (1, 2)}}
    save(tmp_path / "c", 5, identity=identity)
    manifest = read_manifest(tmp_path / "c")
    assert manifest.identity == identity and manifest.step == 5
    assert manifest.values == flatten_state(state(5))[1]
