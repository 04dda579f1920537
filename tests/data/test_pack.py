"""Trees of tensors: which leaves are mapped, which types survive."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch

from trainer_kit.data import batch_size, iterate_tensors, map_tensors
from trainer_kit.data.pack import as_pack
from trainer_kit.exceptions import ConfigurationError

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str
    length: int = dataclasses.field(init=False, default=3)


class Movable:
    def __init__(self):
        self.moved_to = None

    def to(self, device):
        self.moved_to = device
        return self


class Outputs(OrderedDict):
    """As transformers returns them: entries are attributes too, and the number of entries is fixed."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def forbidden(self, *args, **kwargs):
        raise RuntimeError("not for outputs of a model")

    update = pop = setdefault = __delitem__ = forbidden


def double(tree):
    return map_tensors(lambda t: t * 2, tree)


def test_every_container_keeps_its_type_and_other_leaves_pass_unchanged():
    """Contract 19."""
    leaf = object()
    tree = {
        "list": [torch.ones(2), "text", None],
        "tuple": (torch.ones(1), 3),
        "pair": Pair(torch.ones(1), leaf),
        "dataclass": Sample(torch.ones(2), "a"),
        "ordered": OrderedDict(b=torch.ones(1), a=1.5),
        "default": defaultdict(list, x=torch.ones(1)),
        "user": UserDict(x=torch.ones(1)),
        "proxy": MappingProxyType({"x": torch.ones(1)}),
        "shape": torch.Size([2, 3]),
    }
    out = double(tree)
    assert out["list"][0].tolist() == [2, 2] and out["list"][1:] == ["text", None]
    assert type(out["tuple"]) is tuple and out["tuple"][0].item() == 2 and out["tuple"][1] == 3
    assert type(out["pair"]) is Pair and out["pair"].first.item() == 2 and out["pair"].second is leaf
    assert type(out["dataclass"]) is Sample and out["dataclass"].x.tolist() == [2, 2]
    assert (out["dataclass"].name, out["dataclass"].length) == ("a", 3)
    assert type(out["ordered"]) is OrderedDict and list(out["ordered"]) == ["b", "a"] and out["ordered"]["b"].item() == 2
    assert type(out["default"]) is defaultdict and out["default"]["missing"] == [] and out["default"]["x"].item() == 2
    assert type(out["user"]) is UserDict and out["user"]["x"].item() == 2
    assert out["proxy"]["x"].item() == 2
    assert out["shape"] == torch.Size([2, 3])
    assert all(t.eq(1).all() for t in iterate_tensors(tree)), "the given tree is not changed"


def test_a_mapping_that_forbids_update_is_filled_entry_by_entry():
    outputs = Outputs()
    outputs["logits"], outputs["states"] = torch.ones(2), (torch.ones(1), None)
    doubled = double(outputs)
    assert type(doubled) is Outputs and list(doubled) == ["logits", "states"]
    assert doubled.logits.tolist() == doubled["logits"].tolist() == [2, 2] and doubled.states[0].tolist() == [2]
    assert outputs.logits.tolist() == [1, 1]


def test_an_object_that_moves_itself_is_left_to_itself():
    """Contract 19: a PackedSequence is a tuple whose second tensor must stay on the host."""
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2), torch.tensor([3, 2]))
    movable = Movable()
    out = map_tensors(lambda t: t * 2, [packed, movable], lambda o: o.to("meta"))
    assert out[0].data.device.type == "meta" and out[0].batch_sizes.device.type == "cpu"
    assert out[1] is movable and movable.moved_to == "meta"
    assert map_tensors(lambda t: t * 2, packed) is packed


@pytest.mark.parametrize(
    ("tree", "size"),
    [
        (torch.zeros(4, 2), 4),
        ({"id": "a", "scalar": torch.tensor(1.0), "x": [torch.zeros(3)]}, 3),
        (Sample(torch.zeros(5), "a"), 5),
        ([{"text": "a", "x": torch.zeros(7, 2)}, torch.zeros(3)], 7),
        ({"text": ["a", "b"]}, None),
        ((1, "a", None), None),
        (torch.tensor(1.0), None),
    ],
)
def test_batch_size_is_dim_0_of_the_first_tensor_that_has_one(tree, size):
    assert batch_size(tree) == size


@pytest.mark.parametrize(
    ("found", "words"), [((1, 2), ["Mine.packs", "tuple", "[microbatch]"]), ([], ["Mine.packs", "without microbatches"])]
)
def test_what_is_no_pack_is_refused(found, words):
    with pytest.raises(ConfigurationError) as error:
        as_pack(found, 0, "Mine")
    assert all(word in str(error.value) for word in words)
