"""The arithmetic of domains against torch's own view of the ranks as a grid, for every combination of degrees."""

import itertools
import math

import pytest
import torch

from trainer_kit import MeshStrategy
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.domains import DEGREES, Domain, domains_of
from trainer_kit.mesh.groups import GroupCache
from trainer_kit.mesh.meshes import Meshes


def factorizations(number: int, length: int):
    """All ordered products of `length` factors."""
    if length == 1:
        yield (number,)
        return
    for first in (factor for factor in range(1, number + 1) if number % factor == 0):
        yield from ((first, *rest) for rest in factorizations(number // first, length - 1))


def strategies(num_ranks: int):
    for sizes in factorizations(num_ranks, len(DEGREES)):
        degrees = dict(zip(DEGREES, sizes, strict=True))
        per_stage = num_ranks // degrees["pp"]
        for ep in (ep for ep in range(1, per_stage + 1) if per_stage % ep == 0):
            yield MeshStrategy(**degrees, ep=ep)


def grid(domain: Domain) -> torch.Tensor:
    return torch.arange(domain.world_size).view(domain.shape)


@pytest.mark.parametrize("num_ranks", range(1, 17))
def test_every_domain_holds_every_rank_for_every_combination_of_degrees(num_ranks):
    """Contract 9: the groups along each dimension, and along each pair of neighbours, cut the world without gap or overlap."""
    count = 0
    for strategy in strategies(num_ranks):
        found = domains_of(strategy)
        assert list(found) == ["regular", "dense", "expert", "batch", "flat"]
        for domain in found.values():
            assert domain.world_size == num_ranks
            for dims in [(dim,) for dim in domain.dims] + list(itertools.pairwise(domain.dims)):
                groups = list(domain.groups(*dims))
                assert sorted(itertools.chain(*groups)) == list(range(num_ranks))
                assert {len(group) for group in groups} == {domain.size(*dims)}
        count += 1
    assert count >= (len(DEGREES) if num_ranks > 1 else 1), "at the least all ranks along one of them"


@pytest.mark.parametrize("num_ranks", [6, 8])
def test_groups_and_coordinates_are_those_of_a_grid(num_ranks):
    """Contract 9, against torch: a group is a line (or plane) of the grid of ranks, in ascending order."""
    for strategy in strategies(num_ranks):
        for domain in domains_of(strategy).values():
            ranks = grid(domain)
            for index, dim in enumerate(domain.dims):
                lines = {tuple(line) for line in ranks.movedim(index, -1).reshape(-1, domain.shape[index]).tolist()}
                assert set(domain.groups(dim)) == lines
            for rank in range(num_ranks):
                place = [int(index) for index in (ranks == rank).nonzero()[0]]
                assert list(domain.coordinates(rank).values()) == place


def test_a_product_of_dimensions_counts_the_last_one_fastest():
    domain = domains_of(MeshStrategy(dp_replicate=2, dp_shard=3, tp=2))["regular"]
    assert list(domain.groups("dp_replicate", "dp_shard")) == [(0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11)]
    assert [domain.coordinate(rank, "dp_replicate", "dp_shard") for rank in (0, 1, 2, 6, 11)] == [0, 0, 1, 3, 5]


@pytest.mark.parametrize(
    ("degrees", "shape"),
    [
        ({"tp": 2, "ep": 4}, (1, 1, 2, 4)),  # ep reaches over tp into the replicas, which become shards
        ({"tp": 2, "ep": 2}, (1, 4, 1, 2)),
        ({"tp": 2}, (1, 4, 2, 1)),
        ({"dp_shard": 4, "ep": 4}, (1, 2, 1, 4)),
        ({"dp_shard": 4, "ep": 2}, (1, 2, 2, 2)),
        ({"pp": 2, "dp_shard": 2, "ep": 4}, (2, 1, 1, 4)),
        ({"cp_shard": 2, "cp_replicate": 2, "ep": 8}, (1, 1, 1, 8)),
    ],
)
def test_experts_are_sharded_over_ep_and_what_is_left(degrees, shape):
    """Contract 9: on 8 ranks; replicas of experts stay where ep divides the other ranks of a stage."""
    expert = domains_of(MeshStrategy(**degrees).resolve(8))["expert"]
    assert expert.dims == ("pp", "ep_replicate", "ep_shard", "ep") and expert.shape == shape
    assert all(group == tuple(range(group[0], group[0] + shape[-1])) for group in expert.groups("ep"))


def test_ep_that_does_not_divide_a_stage_says_the_arithmetic():
    with pytest.raises(ConfigurationError, match=r"ep=3.*4 ranks.*dp_shard 2.*tp 2"):
        domains_of(MeshStrategy(dp_replicate=1, dp_shard=2, tp=2, ep=3))


def test_a_dimension_that_is_not_there_names_those_that_are():
    with pytest.raises(ConfigurationError, match=r"'dense'.*'dp'.*dp_replicate, dp_cp_shard, cp_replicate, tp"):
        domains_of(MeshStrategy(dp_replicate=2))["dense"].size("dp")


def test_a_mesh_of_1024_ranks():
    """Contract 9 at the size of a cluster, with torch's process groups that only pretend."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, strategy = 637, MeshStrategy(pp=2, dp_replicate=2, dp_shard=16, cp_shard=2, tp=8, ep=16)
    found = domains_of(strategy)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1024)
    try:
        meshes = Meshes(found, GroupCache(dist.default_pg_timeout), "cpu")
        for name, domain in found.items():
            mesh = meshes.mesh_for(name)
            assert torch.equal(mesh.mesh, grid(domain).to(mesh.mesh.dtype)) and mesh.mesh_dim_names == domain.dims
            for dim in domain.dims:
                assert mesh.get_local_rank(dim) == domain.coordinates(rank)[dim]
                assert rank in dist.get_process_group_ranks(mesh.get_group(dim))
        assert math.prod(found["expert"].shape) == 1024
        assert dist.get_process_group_ranks(meshes.group("dense", "dp_replicate", "dp_cp_shard")) == list(range(512 + 5, 1024, 8))
    finally:
        dist.destroy_process_group()
