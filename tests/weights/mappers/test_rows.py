"""Mappers that choose, add or reorder positions: resized vocabularies, rotary layouts, one entry of a stack."""

import pytest
import torch

from tests.weights.mosaics import assemble
from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.weights import Pad, Permute, Select, Slice, half_split_order

ROWS = torch.arange(8.0).reshape(4, 2)


def apply(mapper, tensor):
    return mapper.apply({"a": tensor})["a"]


def test_slice_keeps_some_and_says_that_the_rest_is_lost():
    """Contract 36."""
    mapper = Slice("a", source_size=4, size=2, start=1)
    assert apply(mapper, ROWS).tolist() == [[2.0, 3.0], [4.0, 5.0]]
    with pytest.raises(UnsupportedError, match=r"leaves out 2 positions; inverse\(lossy=True\) fills in zeros"):
        mapper.inverse()
    assert apply(mapper.inverse(lossy=True), ROWS[1:3]).tolist() == [[0.0, 0.0], [2.0, 3.0], [4.0, 5.0], [0.0, 0.0]]


def test_pad_adds_and_its_lossy_inverse_takes_away():
    """Contract 36: a vocabulary resize inverts only with lossy=True."""
    mapper = Pad("a", source_size=4, size=6)
    padded = apply(mapper, ROWS)
    assert torch.equal(padded, torch.cat([ROWS, torch.zeros(2, 2)]))
    with pytest.raises(UnsupportedError, match=r"adds 2 positions; inverse\(lossy=True\) takes them away"):
        mapper.inverse()
    assert torch.equal(apply(mapper.inverse(lossy=True), padded), ROWS)


@pytest.mark.parametrize(
    ("tensor", "settings", "expected"),
    [
        (torch.tensor([1, 2]), {"fill": 7}, [1, 2, 7]),
        (torch.tensor([1, 2]), {"fill": 7, "start": 1}, [7, 1, 2]),
        (torch.tensor([[1.0, 3.0]]), {"fill": "mean", "dim": 1}, [[1.0, 3.0, 2.0]]),
        (torch.tensor([[1.0, 3.0]]), {"fill": "mean", "dim": -1}, [[1.0, 3.0, 2.0]]),
    ],
)
def test_what_new_positions_hold(tensor, settings, expected):
    assert apply(Pad("a", source_size=2, size=3, **settings), tensor).tolist() == expected


def test_the_mean_of_small_floats_is_taken_in_float32():
    """300 times 300 is beyond float16."""
    rows = torch.full((300, 1), 300.0, dtype=torch.float16)
    padded = apply(Pad("a", source_size=300, size=301, fill="mean"), rows)
    assert padded.dtype == torch.float16 and padded[-1].item() == 300.0


def test_permute_and_the_way_back():
    """Contract 36: position k of the output is position order[k] of the input."""
    mapper = Permute("a", order=[2, 3, 0, 1])
    assert apply(mapper, torch.tensor([10, 11, 12, 13])).tolist() == [12, 13, 10, 11]
    assert apply(mapper.inverse(), apply(mapper, ROWS)).tolist() == ROWS.tolist()
    assert [piece.sizes for piece in mapper.pieces({"a": (4, 2)})["a"]] == [(2, 2), (2, 2)]  # consecutive rows are one piece


@pytest.mark.parametrize(("num_heads", "head_size"), [(1, 2), (3, 8)])
def test_half_split_order_is_that_of_the_conversion_script(num_heads, head_size):
    """As transformers converts Meta's Llama: `w.view(heads, size // 2, 2, -1).transpose(1, 2)`."""
    weight = torch.randn(num_heads * head_size, 5)
    expected = weight.view(num_heads, head_size // 2, 2, 5).transpose(1, 2).reshape(-1, 5)
    assert torch.equal(apply(Permute("a", order=half_split_order(num_heads, head_size)), weight), expected)


def test_half_split_order_of_partial_rotary():
    assert half_split_order(2, 6, rotary_size=4) == (0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11)
    with pytest.raises(ConfigurationError, match="3 rotary rows per head, expected an even number up to head_size=4"):
        half_split_order(1, 4, rotary_size=3)


def test_select_takes_one_entry_and_has_no_inverse():
    """Contract 36: one that can't be inverted says so."""
    mapper = Select("a", index=-1, dim=1)
    assert apply(mapper, torch.tensor([[1, 2], [3, 4]])).tolist() == [2, 4]
    assert assemble(mapper.pieces({"a": (4, 2)})["a"], {"a": ROWS}, torch.empty(4)).tolist() == ROWS[:, -1].tolist()
    for lossy in (False, True):
        with pytest.raises(UnsupportedError, match="has no inverse, not even a lossy one"):
            mapper.inverse(lossy=lossy)


@pytest.mark.parametrize(
    ("mapper", "shape", "words"),
    [
        (Slice("a", source_size=4, size=2), (5, 2), r"'a' has shape \[5, 2\], expected size 4 at dim=0; change source_size="),
        (Pad("a", source_size=4, size=5, dim=1), (4, 2), "expected size 4 at dim=1; change source_size="),
        (Pad("a", source_size=4, size=5), (), "expected a shape that has dim=0"),
        (Permute("a", order=[1, 0]), (3,), r"expected size 2 at dim=0; change order="),
        (Select("a", index=3), (3,), "expected a shape that has index=3 at dim=0"),
    ],
)
def test_wrong_shapes_are_told_with_tensor_and_argument(mapper, shape, words):
    """Contract 35."""
    with pytest.raises(ConfigurationError, match=words):
        apply(mapper, torch.empty(shape, device="meta"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Slice("a", source_size=4, size=3, start=2), "3 positions from 2 are not in 4"),
        (lambda: Pad("a", source_size=4, size=3), "4 positions from 0 do not fit into 3"),
        (lambda: Pad("a", source_size=4, size=5, fill="median"), 'expected a number, or "mean"'),
        (lambda: Permute("a", order=[0, 2]), r"order= must hold each of 0..1 once"),
        (lambda: apply(Pad("a", source_size=1, size=2, fill="mean"), torch.tensor([1])), "needs floating point, 'a' is torch.int64"),
    ],
)
def test_wrong_arguments(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()
