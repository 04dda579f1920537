"""Process groups and meshes of living ranks: right members, shared between domains, made once."""

import torch

from tests.mesh.support import build
from trainer_kit.testing import run_on_ranks


def job_places() -> dict:
    """On 4 ranks: tp 2 x dp_shard 2."""
    import torch.distributed as dist

    context = build(dp_shard=2, tp=2)
    members = {
        name: dist.get_process_group_ranks(context.group(*name.split()))
        for name in ("batch dp", "batch tp", "dense dp_cp_shard", "dense tp", "expert ep_shard", "flat world")
    }
    shared = {
        "data": context.data_group is context.group("dense", "dp_cp_shard") is context.group("regular", "dp_shard"),
        "tensor": context.group("batch", "tp") is context.group("dense", "tp"),
        "world": context.group("flat", "world") is context.group("expert", "ep_shard") is dist.group.WORLD,
        "mesh": context.mesh_for("dense").get_group("dp_cp_shard") is context.data_group,
        "alone": context.mesh_for("dense").get_group("pp") is context.mesh_for("batch").get_group("cp"),
        "again": build(dp_shard=2, tp=2).data_group is context.data_group,
    }
    mesh = context.mesh_for("dense")
    sums = {}
    for name, group in (("tp", mesh["tp"].get_group()), ("data", context.data_group), ("alone", mesh.get_group("pp"))):
        number = torch.tensor(float(10**context.rank))
        dist.all_reduce(number, group=group)
        sums[name] = number.item()
    return {
        "place": (context.rank, context.world_size, context.local_rank, context.node, context.is_main),
        "data": (context.data_rank, context.num_data_ranks),
        "tensor": (context.tensor_rank, context.num_tensor_ranks, context.is_counted),
        "members": members,
        "shared": shared,
        "sums": sums,
        "alone": context.group("batch", "cp"),
        "sizes": context.dense_sizes(),
        "slices": (mesh["tp"].mesh.tolist(), mesh["dp_replicate", "dp_cp_shard"].mesh.tolist()),
        "text": (context.describe(), context.logger.process("hello %d", {})[0]),
    }


def test_each_rank_is_in_its_place_and_its_groups():
    """Contracts 9 and 15: tensor peers share a data rank, and domains share the groups of equal ranks."""
    found = run_on_ranks(4, job_places)
    assert [place["place"] for place in found] == [(rank, 4, rank, 0, rank == 0) for rank in range(4)]
    assert [place["data"] for place in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [place["tensor"] for place in found] == [(0, 2, True), (1, 2, False), (0, 2, True), (1, 2, False)]
    for rank, place in enumerate(found):
        data, tensor = [rank % 2, rank % 2 + 2], [rank - rank % 2, rank - rank % 2 + 1]
        assert place["members"] == {
            "batch dp": data,
            "batch tp": tensor,
            "dense dp_cp_shard": data,
            "dense tp": tensor,
            "expert ep_shard": [0, 1, 2, 3],
            "flat world": [0, 1, 2, 3],
        }
        assert all(place["shared"].values()), place["shared"]
        assert place["sums"] == {"tp": sum(10.0**r for r in tensor), "data": sum(10.0**r for r in data), "alone": 10.0**rank}
        assert place["alone"] is None
        assert place["sizes"] == {"dp_replicate": 1, "dp_cp_shard": 2, "cp_replicate": 1, "tp": 2}
        assert place["slices"] == (tensor, [data])
        assert place["text"] == ("4 ranks on cpu: dp_shard 2, tp 2", f"[rank {rank}: dp {rank // 2}, tp {rank % 2}] hello %d")
