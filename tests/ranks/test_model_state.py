"""`trainer.model_state()` on a mesh: the tensors of an export, in buckets, on all ranks or on one; and a rank that leaves early."""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks.test_pipeline_export import INTERLEAVED, ZBV, Foreign, Net, digests, make, whole_mapper
from trainer_kit.exceptions import StateError
from trainer_kit.testing import run_on_ranks

MESHES = {
    "fsdp": (2, {"dp_shard": 2}), "replicas": (2, {"dp_replicate": 2}), "interleaved": (2, INTERLEAVED),
    "zbv x fsdp": (4, {**ZBV, "dp_shard": 2, "fsdp_sync": "pack"}),
}  # fmt: skip
BUCKET = 60


def streamed(degrees):
    """The buckets of this rank: through the provider's mappers and through one of the whole model, to all and to one."""
    trainer, found = make(Foreign(), degrees), []
    for mapper in (None, whole_mapper()):
        for to in ("all", "main"):
            with trainer.model_state(mapper, bucket_bytes=BUCKET, to=to, dtype=torch.float64) as buckets:
                found.append([list(bucket) for bucket in buckets])
    trainer.close()
    return found


def export_shards(folder, degrees):
    trainer = make(Foreign(), degrees)
    trainer.export(f"{folder}/foreign", max_shard_size=BUCKET)
    trainer.export(f"{folder}/whole", mapper=whole_mapper(), max_shard_size=BUCKET, dtype=torch.float64)
    trainer.close()


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    export_shards(str(folder), {})
    return folder, streamed({})


@pytest.mark.parametrize("mesh", MESHES)
def test_all_ranks_or_one_get_what_an_export_writes(mesh, of_one_process, tmp_path):
    """B98, contract 37, with shards of several stages in one file, made by mappers that only one stage has."""
    folder, expected = of_one_process
    num_ranks, degrees = MESHES[mesh]
    for rank, found in enumerate(run_on_ranks(num_ranks, streamed, degrees)):
        for index, buckets in enumerate(found):
            is_empty = index % 2 == 1 and rank > 0
            assert [len(bucket) for bucket in buckets] == [0 if is_empty else len(bucket) for bucket in expected[index]]
            for bucket, other in zip(buckets, expected[index], strict=True):
                for (name, tensor), (wanted, value) in zip(bucket, other, strict=not is_empty):
                    assert name == wanted and torch.equal(tensor, value) and tensor.dtype == value.dtype
    run_on_ranks(num_ranks, export_shards, str(tmp_path), degrees)
    assert digests(tmp_path) == digests(folder)


def test_the_buckets_hold_what_the_files_do(of_one_process):
    """Contract 37: the same tensors in the dtype that is asked for, in buckets of at most so many bytes, or one larger tensor."""
    folder, streams = of_one_process
    files = {name: x for path in Path(folder / "whole").glob("*.safetensors") for name, x in load_file(path).items()}
    for buckets in streams[2:]:
        found = {name: tensor for bucket in buckets for name, tensor in bucket}
        assert found.keys() == files.keys() and all(torch.equal(found[name], files[name]) for name in files)
        assert all(len(bucket) == 1 or sum(x.numel() * x.element_size() for _, x in bucket) <= BUCKET for bucket in buckets)


def leave(degrees):
    """What this rank was told when all ranks left early, when one of them did, when one failed, and when one did not come, with good
    calls between them; and how long each took."""
    trainer, said, seconds = make(Net, degrees), [], []
    rank = trainer.context.rank

    def attempt(action):
        begin = time.monotonic()
        try:
            with trainer.model_state(bucket_bytes=8) as buckets:
                action(buckets)
            said.append("")
        except (StateError, ZeroDivisionError) as error:
            said.append(f"{type(error).__name__}: {error}")
        seconds.append(time.monotonic() - begin)

    def fail_on_rank_1(buckets):
        for number, _ in enumerate(buckets):
            if number == 1 and rank == 1:
                raise ZeroDivisionError("no such luck")

    attempt(lambda buckets: next(buckets))
    attempt(lambda buckets: next(buckets) if rank == 1 else list(buckets))
    attempt(list)
    attempt(fail_on_rank_1)
    attempt(list)
    trainer.context.host.agree_timeout = 1.0
    if rank == 1:
        attempt(list)
    trainer.context.host.barrier()
    trainer.close()
    return said, seconds


def test_a_rank_that_leaves_early_is_no_hang():
    """Contract 41: all may; one alone is told on every rank, by the names of what they do; an error is seen by the others at once; a call
    on one rank alone fails; and calls work again afterwards."""
    (first, seconds), (second, _) = run_on_ranks(2, leave, {"dp_shard": 2}, timeout=40.0)
    early = (
        "StateError: the next bucket of model_state() was called on rank 0, while rank 1 is in the end of model_state(); both are "
        "collective, call them on every rank in the same order"
    )
    assert first[:3] == ["", early, ""] and second[:3] == ["", early, ""]
    assert "no such luck" in first[3] and first[3].startswith("StateError") and second[3] == "ZeroDivisionError: no such luck"
    assert seconds[3] < 10
    assert first[4:] == [""] and second[4] == ""
    assert second[5].startswith("StateError: rank 0 did not come to model_state()")
