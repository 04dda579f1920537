"""Descriptions of transfers: any pytree, told apart by paths, and errors that say what was found and what was expected."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.pipeline.transfer_spec import TransferSpec, check_describes_transfers, transfer_spec


@dataclass
class State:
    hidden: torch.Tensor
    note: str = "of the sender"


def tree(device=None, note="x"):
    mask, ids = torch.zeros(2, 3, dtype=torch.bool, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    return {"more": [mask, (State(torch.zeros(3, device=device), note), None)], "ids": ids}


def test_any_tree_is_taken_apart_and_put_together_again():
    spec = TransferSpec(tree("meta", "of the receiver"))
    sent = tree()
    reordered = {"ids": sent["ids"], "more": sent["more"]}
    tensors = spec.flatten(reordered)
    assert [str(each) for each in spec.tensors] == ["ids: int64 [4]", "more[0]: bool [2, 3]", "more[1][0].hidden: float32 [3]"]
    assert spec.differentiable == (2,)
    assert tensors[0] is sent["ids"] and tensors[1] is sent["more"][0] and tensors[2] is sent["more"][1][0].hidden
    built = spec.rebuild(tensors)
    assert built["ids"] is sent["ids"] and built["more"][0] is sent["more"][0]
    assert built["more"][1] == (State(sent["more"][1][0].hidden, "of the receiver"), None)


def test_both_sides_agree_whatever_the_order_of_their_keys():
    one = TransferSpec({"a": torch.empty(2, device="meta"), "b": torch.empty(2, device="meta")})
    other = TransferSpec({"b": torch.empty(2, device="meta"), "a": torch.empty(2, device="meta")})
    assert one.checksum == other.checksum and one.tensors == other.tensors
    a, b = torch.zeros(2), torch.ones(2)
    assert other.rebuild(one.flatten({"b": b, "a": a})) == {"b": b, "a": a}
    assert one.checksum != TransferSpec({"a": torch.empty(2, device="meta"), "c": torch.empty(2, device="meta")}).checksum


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(2, 3), "returned float32 [2, 3], where its stage_transfer_spec(inputs, 'outgoing') says float32 [2, 4]"),
        (torch.zeros(2, 4).double(), "returned float64 [2, 4], where its stage_transfer_spec(inputs, 'outgoing') says float32 [2, 4]"),
        ({"x": torch.zeros(2, 4)}, "returned x: float32 [2, 4], where its stage_transfer_spec(inputs, 'outgoing') says float32 [2, 4]"),
        (None, "returned no other tensor, where its stage_transfer_spec(inputs, 'outgoing') says float32 [2, 4]"),
    ],
)
def test_what_does_not_fit_is_named(returned, message):
    with pytest.raises(ModelError) as caught:
        TransferSpec(torch.empty(2, 4, device="meta")).flatten(returned)
    assert message in str(caught.value)


def test_a_tensor_too_many_is_named():
    spec = TransferSpec((torch.empty(2, device="meta"),))
    with pytest.raises(ModelError, match=r"returned \[1\]: float32 \[3\], where .* says nothing of it"):
        spec.flatten((torch.zeros(2), torch.zeros(3)))


class Silent(nn.Linear):
    stage_transfer_spec = None


class Vague(nn.Module):
    def stage_transfer_spec(self, inputs, boundary):
        return {"hidden": None}


def test_a_module_must_describe_its_transfers():
    with pytest.raises(ModelError, match=r"Silent, the module of stage 1 on rank 3, has no stage_transfer_spec\(inputs, boundary\)"):
        check_describes_transfers(Silent(1, 1), "stage 1 on rank 3")
    check_describes_transfers(Vague(), "stage 0 on rank 0")
    with pytest.raises(ModelError, match=r"Vague.stage_transfer_spec\(inputs, 'outgoing'\) returned \{'hidden': None\}, expected a pytree"):
        transfer_spec(Vague(), None, "outgoing")
