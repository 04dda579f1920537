"""Mappers of mappers: side by side, one after another, below prefixes, per layer, and in parts."""

import pytest
import torch

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.weights import (
    Cast,
    Chunk,
    Concatenate,
    Constant,
    Copy,
    Drop,
    IdentityMapper,
    Only,
    Parallel,
    Prefix,
    Rename,
    Sequential,
    Stack,
    StateGroup,
    Transpose,
    Unstack,
    check_groups,
    expand,
    for_each,
)


def group(inputs, outputs):
    return StateGroup(frozenset(inputs), frozenset(outputs))


@pytest.mark.parametrize(
    ("mappers", "words"),
    [
        ([Rename("a", "x"), Rename("b", "x")], "output 'x' is made by 2 groups"),
        ([Rename("a", "x"), Drop("a")], "input 'a' is used by 2 groups; one group with several outputs is expected"),
        (Rename("a", "x"), "takes a list of mappers"),
        ([print], "takes state mappers, found <built-in function print>"),
    ],
)
def test_side_by_side_without_overlaps(mappers, words):
    """Contract 35."""
    with pytest.raises(ConfigurationError, match=words):
        Parallel(mappers)


def test_unknown_inputs_are_refused_by_name():
    mapper = Parallel([Rename("a", "x"), Rename("b", "y")])
    for inputs in (["c"], ["a", "b"], []):
        with pytest.raises(ConfigurationError, match="no group of .* has the inputs"):
            mapper.apply({name: torch.zeros(1) for name in inputs})


def test_groups_of_a_sequence_are_what_hangs_together():
    """Contract 35: the connected components, with what passes from either side."""
    mapper = Sequential(
        [
            Parallel([Chunk("qk", ["q", "k"]), Rename("value", "v"), Rename("o", "out")]),
            Parallel([Concatenate(["q", "k", "v"], "qkv"), Rename("norm", "n")]),
        ]
    )
    assert set(mapper.groups()) == {group(["qk", "value"], ["qkv"]), group(["o"], ["out"]), group(["norm"], ["n"])}
    made = mapper.apply({"qk": torch.tensor([1, 2]), "value": torch.tensor([3])})
    assert made["qkv"].tolist() == [1, 2, 3]
    assert set(mapper.inverse().groups()) == {group(["qkv"], ["qk", "value"]), group(["out"], ["o"]), group(["n"], ["norm"])}


def test_names_may_change_places():
    mapper = Sequential([Parallel([Rename("a", "b"), Rename("b", "a")]), Concatenate(["a", "b"], "c")])
    assert mapper.apply({"a": torch.tensor([1]), "b": torch.tensor([2])})["c"].tolist() == [2, 1]


@pytest.mark.parametrize(
    ("mappers", "words"),
    [
        ([Rename("a", "x"), Rename("b", "x")], "stage 1 makes 'x', which an earlier stage made and stage 1 does not take"),
        ([Rename("a", "x"), Rename("a", "y")], "stage 1 takes 'a', which an earlier stage used up; Copy makes two of one"),
        ([Rename("a", "x"), Rename("x", "y"), Rename("x", "z")], "stage 2 takes 'x', which an earlier stage used up"),
    ],
)
def test_one_after_another_without_overlaps(mappers, words):
    """Contract 35."""
    with pytest.raises(ConfigurationError, match=words):
        Sequential(mappers)


def test_constants_and_drops_in_a_sequence():
    """Contract 36."""
    mapper = Sequential(
        [
            Parallel([Constant("c", torch.tensor([9])), Constant("d", torch.tensor([8])), Chunk("ab", ["a", "b"])]),
            Parallel([Concatenate(["a", "c"], "x"), Drop("b")]),
        ]
    )
    assert mapper.groups() == [group(["ab"], ["x", "d"])]
    made = mapper.apply({"ab": torch.tensor([1, 2])})
    assert made["x"].tolist() == [1, 9] and made["d"].tolist() == [8]
    with pytest.raises(UnsupportedError):
        mapper.inverse()
    unused = Sequential([Constant("c", torch.ones(1)), Drop("c")])
    assert unused.groups() == []


def test_constants_alone_are_one_group():
    mapper = Sequential([Constant("c", torch.ones(2)), Parallel([Transpose("w"), Constant("d", torch.zeros(1))])])
    assert set(mapper.groups()) == {group([], ["c", "d"]), group(["w"], ["w"])}
    assert mapper.apply({}).keys() == {"c", "d"}
    check_groups(mapper.groups())


def test_what_a_cast_touches_has_no_pieces_and_the_rest_has():
    """Contract 34: slices are read where the mapping allows."""
    mapper = Sequential([Chunk("ab", ["a", "b"]), Parallel([Cast("a", dtype=torch.float64), Rename("b", "c")])])
    assert mapper.pieces({"ab": (4,)}).keys() == {"c"}


def test_a_prefix_on_either_side():
    """Contract 36: scoped."""
    mapper = Prefix(Rename("x", "y"), inputs="model.", outputs="net.")
    assert mapper.groups() == [group(["model.x"], ["net.y"])]
    assert mapper.apply({"model.x": torch.tensor(1)})["net.y"] == 1
    assert mapper.inverse().groups() == [group(["net.y"], ["model.x"])]
    assert mapper.pieces({"model.x": (2,)})["net.y"][0].source == "model.x"
    with pytest.raises(ConfigurationError, match="'x'"):
        mapper.apply({"x": torch.tensor(1)})


def test_one_mapper_per_layer_and_expert():
    """Contract 36: templates nest, and a name with a placeholder that is not filled is refused before anything is read."""
    experts = Stack(expand("layers.{i}.experts.{e}.up", e=range(3)), "blocks.{i}.up")
    layer = Parallel([experts, Rename("layers.{i}.norm", "blocks.{i}.norm"), for_each({"e": range(2)}, Rename("s.{i}.{e}", "t.{i}.{e}"))])
    mapper = for_each({"i": range(2)}, layer)
    check_groups(mapper.groups())
    assert len(mapper.groups()) == 2 * (1 + 1 + 2)
    assert group(["layers.1.experts.0.up", "layers.1.experts.1.up", "layers.1.experts.2.up"], ["blocks.1.up"]) in mapper.groups()
    assert mapper.inverse().apply({"t.1.0": torch.tensor(5)}) == {"s.1.0": torch.tensor(5)}
    with pytest.raises(ConfigurationError, match=r"'blocks.\{i\}.norm' has a placeholder that nothing fills; .*for_each\(\{'i': ...\}"):
        check_groups(layer.groups())


def test_indices_are_combined_and_functions_get_them_by_name():
    assert len(for_each({"i": range(2), "e": range(3)}, Rename("a.{i}.{e}", "b.{i}.{e}")).groups()) == 6
    mapper = for_each({"i": range(2)}, lambda i: Rename(f"a.{i}", f"b.{i}") if i else Drop("a.0"))
    assert mapper.groups() == [group(["a.0"], []), group(["a.1"], ["b.1"])]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: for_each({"j": range(2)}, Rename("a.{i}", "b.{i}")), r"for_each over 'j': the name 'a.\{i\}' .* does not hold \{j\}"),
        (lambda: for_each({"i": range(2)}, Rename("a.{i}", "b")), "the name 'b' of .* does not hold {i}"),
        (lambda: for_each(range(2), Rename("a.{i}", "b.{i}")), r'a mapping from placeholder to values, such as \{"i": range\(4\)\}'),
        (lambda: expand("a.{e}", i=range(2)), r"has no placeholder \{i\}; valid names: e"),
    ],
)
def test_placeholders_that_do_not_fit(make, words):
    """Contract 35."""
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_only_some_outputs_and_the_rest_is_left_out_on_purpose():
    """Contract 35."""
    inner = Parallel([Rename("model.w", "w"), Rename("head.w", "head"), Copy("tied", ["x", "y"]), Constant("c", torch.ones(1))])
    mapper = Only(inner, ["w", "x"])
    assert set(mapper.groups()) == {group(["model.w"], ["w"]), group(["head.w"], []), group(["tied"], ["x"])}
    assert mapper.apply({"tied": torch.tensor(1)}).keys() == {"x"} == mapper.pieces({"tied": ()}).keys()
    assert mapper.apply({"head.w": torch.tensor(1)}) == {}
    assert {name for found in Only(inner, "*", drop_others=False).groups() for name in found.outputs} == {"w", "head", "x", "y", "c"}
    with pytest.raises(ConfigurationError, match=r"makes nothing that matches \['weight'\]"):
        Only(inner, ["w", "weight"])


def test_the_inverse_of_only():
    """Contract 36."""
    inner = Parallel([Rename("model.w", "w"), Rename("head.w", "head"), Unstack("xy", ["x", "y"])])
    with pytest.raises(UnsupportedError, match=r"drops .*head.w.*; inverse\(lossy=True\) does without"):
        Only(inner, "w").inverse()
    assert Only(inner, "w").inverse(lossy=True).groups() == [group(["w"], ["model.w"])]
    assert Only(inner, ["w", "?"], drop_others=False).inverse().groups() == [group(["w"], ["model.w"]), group("xy", ["xy"])]
    with pytest.raises(UnsupportedError, match=r"makes \['x'\] alone of \['x', 'y'\]"):
        Only(inner, "x").inverse(lossy=True)


def test_a_part_per_rank():
    """Contract 36: shard over ranks."""
    mapper = Parallel([IdentityMapper(["a", "b", "c"]), Constant("d", torch.ones(1))])
    parts = [mapper.part(rank, 3) for rank in range(3)]
    assert [sorted(name for found in part.groups() for name in found.outputs) for part in parts] == [["a"], ["b"], ["c", "d"]]
    assert parts[2].apply({})["d"].item() == 1.0 and parts[2].pieces({"c": (2,)}).keys() == {"c"}
    with pytest.raises(ConfigurationError, match="no group of"):
        parts[0].apply({"b": torch.ones(1)})
    with pytest.raises(ConfigurationError, match=r"part\(rank=3, num_ranks=3\): expected a rank from 0 to 2"):
        mapper.part(3, 3)


def test_everything_at_once_needs_exactly_the_inputs():
    mapper = Rename("a", "b")
    assert mapper.apply_all({"a": torch.tensor(1)}) == {"b": torch.tensor(1)}
    with pytest.raises(ConfigurationError, match=r"lacks the tensors \['a'\] and has no use for \['c'\]"):
        mapper.apply_all({"c": torch.tensor(1)})
