"""The table of a mapper: layers that are alike in one row, everything else as it is."""

import torch

from trainer_kit.weights import (
    Concatenate,
    Constant,
    Drop,
    IdentityMapper,
    Parallel,
    Prefix,
    Rename,
    Sequential,
    Stack,
    Transpose,
    expand,
    for_each,
)


def test_layers_and_experts_share_a_row():
    """Issue 5: what a user reads to see whether a mapper does what was meant."""
    up = "layers.{i}.experts.{e}.up"
    experts = Sequential([for_each({"e": range(4)}, Transpose(up)), Stack(expand(up, e=range(4)), "blocks.{i}.up")])
    layer = Parallel([Concatenate(["layers.{i}.q.weight", "layers.{i}.k.weight"], "blocks.{i}.qk.weight"), experts])
    stored = Prefix(Parallel([Rename("embed", "embedding"), for_each({"i": range(3)}, layer), Drop("rope.freqs")]), inputs="model.")
    mapper = Parallel([stored, Constant("scale", torch.ones(1)), IdentityMapper(["norm.0", "norm.2"])])
    assert mapper.explain().splitlines() == [
        "11 groups, 22 inputs -> 10 outputs",
        "  inputs                                 operation                            outputs",
        "  -------------------------------------  -----------------------------------  -----------------------",
        "  model.embed                            Rename                               embedding",
        "  model.layers.{0..2}.q.weight           Concatenate dim=0                    blocks.{0..2}.qk.weight",
        "  model.layers.{0..2}.k.weight",
        "  model.layers.{0..2}.experts.{0..3}.up  Transpose dims=(0, 1) → Stack dim=0  blocks.{0..2}.up",
        "  model.rope.freqs                       Drop                                 (left out)",
        "  norm.{0,2}                             as it is                             norm.{0,2}",
        "  (nothing)                              Constant shape=[1]                   scale",
    ]


def rows(mapper):
    """The cells of the table."""
    return [line.split() for line in mapper.explain().splitlines()[3:]]


def test_layers_that_are_not_alike_stay_apart():
    table = Parallel([Rename("a.0", "b.0"), Rename("a.1", "b.1"), Transpose("a.2", "b.2"), Rename("a.3.x", "b.3.x")])
    assert rows(table)[:2] == [["a.{0..1}", "Rename", "b.{0..1}"], ["a.2", "Transpose", "dims=(0,", "1)", "b.2"]]


def test_a_shift_of_layers_is_two_ranges_side_by_side():
    assert rows(for_each({"i": range(2)}, lambda i: Rename(f"a.{i + 4}", f"a.{i}"))) == [["a.{4..5}", "Rename", "a.{0..1}"]]


def test_numbers_that_are_no_ranges_are_told_one_by_one():
    pairs = [(0, 0), (0, 1), (1, 0)]
    mapper = Parallel([Rename(f"a.{i}.{e}", f"b.{i}.{e}") for i, e in pairs])
    assert rows(mapper) == [[f"a.{i}.{e}", "Rename", f"b.{i}.{e}"] for i, e in pairs]


def test_a_mapper_without_groups_has_an_empty_table():
    assert Parallel([]).explain().startswith("0 groups, 0 inputs -> 0 outputs")
