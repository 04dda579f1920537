"""Weights that several stages hold: one value, one gradient, in one optimizer; on two ranks and on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_kit import MeshStrategy
from trainer_kit.exceptions import ModelError
from trainer_kit.optim import AdamW, build_update, optimizer_tensors
from trainer_kit.parameters import ParameterTable, StateEntry, merged_entries
from trainer_kit.testing import run_on_ranks
from trainer_kit.ties import TiedWeights, same_bits, tied_parameters

NUM_STAGES = 4


class StageModule(nn.Module):
    """Weight `w` in the stages 0, 2 and 3, `v` in 0 and 3, each time in another order; `own` is of this stage alone."""

    def __init__(self, stage):
        super().__init__()
        self.ties = {}
        for name in {0: "wv", 1: "", 2: "w", 3: "vw"}[stage]:
            self.register_parameter(f"{name}{stage}" if stage else name, nn.Parameter(torch.full((3,), float(stage + 1))))
            if stage:
                self.ties[f"{name}{stage}"] = name
        self.register_parameter(f"own{stage}", nn.Parameter(torch.full((2,), float(stage + 1))))

    def tied_parameters(self):
        return self.ties


def gradient(name, stage):
    return torch.randn(3, generator=torch.Generator().manual_seed(10 * stage + ord(name)))


def job_ties():
    """Per stage and tied weight: the value and gradient after they were shared, and the value after an update; what the optimizer holds."""
    context = MeshStrategy(device="cpu", pp=2, pipeline="zbv").build()
    table = ParameterTable([StageModule(stage) for stage in context.stages], indices=context.stages, num_stages=NUM_STAGES)
    table.join(context)
    ties = TiedWeights(table.rows, context)
    ties.share_values()
    shared = {(row.name, row.stage): row.local.detach().clone() for row in table}
    for row in table:
        row.local.grad = gradient(row.name, row.stage) if len(row.stages) > 1 else torch.ones(2)
    ties.sum_gradients()
    update = build_update(AdamW(lr=0.1), table.trainable(), context, table.entries)
    update.step()
    held = [row.name for row in update.parameters.values()]
    state = sorted(optimizer_tensors(update.optimizer, update.parameters))
    tied = {key: (value, row.local.grad, row.local.detach()) for (key, value), row in zip(shared.items(), table, strict=True)}
    return tied, held, sorted(update.elsewhere), state, [(entry.name, entry.stages) for entry in table.entries]


def test_all_copies_have_one_value_one_gradient_and_one_update():
    """Contract 12: the stages 0 and 3 are on rank 0, 1 and 2 on rank 1; the sum is in the order of the stages on all of them."""
    results = run_on_ranks(2, job_ties)
    copies = {key: found for tied, *_ in results for key, found in tied.items() if "own" not in key[0]}
    assert sorted(copies) == [("v", 0), ("v", 3), ("w", 0), ("w", 2), ("w", 3)]
    for name, stages in (("v", (0, 3)), ("w", (0, 2, 3))):
        total = gradient(name, stages[0])
        for stage in stages[1:]:
            total += gradient(name, stage)
        for stage in stages:
            value, summed, updated = copies[name, stage]
            assert torch.equal(value, torch.ones(3)) and torch.equal(summed, total)
            assert torch.equal(updated, copies[name, 0][2]) and not torch.equal(updated, value)
    (_, held, elsewhere, state, entries), (_, held_too, elsewhere_too, state_too, _) = results
    assert held == held_too == ["w", "v", "own0", "own1", "own2", "own3"]
    assert entries == [("w", (0, 2, 3)), ("v", (0, 3)), ("own0", (0,)), ("own1", (1,)), ("own2", (2,)), ("own3", (3,))]
    assert elsewhere == ["own1", "own2"] and elsewhere_too == ["own0", "own3", "v"]
    assert {key.split("/")[0] for key in state} == {"w", "v", "own0", "own3"}
    assert {key.split("/")[0] for key in state_too} == {"w", "own1", "own2"}


def entry(name, stage, **change):
    whole = StateEntry(name, (2,), torch.float32, (stage,), True, True, False, ((), (2,)))
    return whole._replace(**change)


@pytest.mark.parametrize(
    "entries, said",
    [
        ([entry("a", 0), entry("a", 1)], "stages 0 and 1 both have a tensor 'a'"),
        ([entry("a", 0), entry("b", 1, is_tie=True)], "stage 1 says that it holds 'b' of an earlier stage, but no earlier"),
        ([entry("a", 1), entry("a", 0, is_tie=True)], "stage 0 says that it holds 'a' of an earlier stage"),
        ([entry("a", 0), entry("a", 1, is_tie=True, shape=(3,))], r"'a' has shape \(2,\) in stage 0 and \(3,\) in stage 1"),
        ([entry("a", 0), entry("a", 1, is_tie=True, dtype=torch.bfloat16)], "has dtype torch.float32 in stage 0 and torch.bfloat16"),
        ([entry("a", 0), entry("a", 1, is_tie=True, is_trainable=False)], "has is_trainable True in stage 0 and False"),
    ],
)
def test_names_of_stages_that_do_not_fit_are_an_error(entries, said):
    """Contracts 12 and 35: whoever came first."""
    with pytest.raises(ModelError, match=said):
        merged_entries(entries)
    with pytest.raises(ModelError, match=said):
        merged_entries(reversed(entries))


def test_entries_are_in_the_order_of_the_model():
    found = merged_entries([entry("b", 1), entry("t", 2, is_tie=True), entry("t", 0), entry("x", 0, is_parameter=False)])
    assert [(each.name, each.stages) for each in found] == [("t", (0, 2)), ("b", (1,)), ("x", (0,))]


def test_a_tie_is_a_parameter_of_its_stage():
    stage = StageModule(3)
    assert tied_parameters(stage) == {"v3": "v", "w3": "w"} and tied_parameters(nn.Linear(1, 1)) == {}
    stage.ties = {"gone": "w"}
    with pytest.raises(ModelError, match=r"tied_parameters\(\) of StageModule returned \{'gone': 'w'\}"):
        tied_parameters(stage)


class Kept(nn.Module):
    """Has an extra state."""

    def get_extra_state(self):
        return 1


def test_every_module_with_an_extra_state_is_found():
    """Also when two stages on one rank have one of the same name, such as their root."""
    first, second = Kept(), Kept()
    first.sub = Kept()
    for stage, module in enumerate((first, second)):
        module.register_parameter(f"w{stage}", nn.Parameter(torch.ones(1)))
    table = ParameterTable([first, second], indices=(0, 3), num_stages=NUM_STAGES)
    assert table.extra_states() == [("", first), ("sub", first.sub), ("", second)]


@pytest.mark.parametrize(
    "tensor", [torch.arange(4.0)[::2][:1], torch.zeros(4, 0)[:, ::2], torch.tensor(1.0), torch.arange(6.0).view(2, 3).T]
)
def test_bits_are_compared_whatever_the_strides(tensor):
    """A tensor of one element, or of none, counts as contiguous with any stride."""
    assert same_bits(tensor, tensor.clone())
    assert not tensor.numel() or not same_bits(tensor, tensor + 1)
