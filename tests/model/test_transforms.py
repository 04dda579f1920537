"""Recomputing and compiling in place, for modules that go from one build to the next."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.model.transforms import checkpoint_activations, compile_blocks, unmatched
from trainer_kit.parallel.blocks import repeated_blocks

WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(2, 2), calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("class")
        return torch.tanh(self.inner(x))


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def model(calls: list[str]) -> nn.Module:
    return nn.Sequential(Block(calls), Block(calls))


def num_forwards(model: nn.Module, calls: list[str]) -> int:
    """Calls of forwards in one forward and backward; 2 without recomputing, 4 with."""
    calls.clear()
    model(torch.ones(1, 2)).sum().backward()
    return len(calls)


def test_recomputing_is_what_the_newest_build_asked_for(model, calls):
    for wanted, expected in ((True, 4), (True, 4), (("1",), 3), (["0", "1"], 4), (False, 2), (True, 4), ((), 2)):
        checkpoint_activations(model, wanted)
        assert num_forwards(model, calls) == expected
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_forward_that_a_user_put_into_an_instance_comes_back(model, calls):
    block = model[0]

    def own(x: torch.Tensor) -> torch.Tensor:
        calls.append("own")
        return block.inner(x)

    block.forward = own
    checkpoint_activations(model, True)
    num_forwards(model, calls)
    assert calls == ["own", "class", "class", "own"]
    checkpoint_activations(model, False)
    assert vars(block)["forward"] is own


def test_a_copy_of_a_model_can_be_built_anew(model, calls):
    """A copy takes what was put in place of its forwards along, bound to itself."""
    checkpoint_activations(model, True)
    copied = copy.deepcopy(model)
    checkpoint_activations(copied, False)
    nn.init.zeros_(copied[1].inner.weight)
    nn.init.zeros_(copied[1].inner.bias)
    assert copied(torch.ones(1, 2)).tolist() == [[0.0, 0.0]]
    assert num_forwards(model, calls) == 4


GRAPHS: list[Any] = []


def keep_graph(graph: Any, inputs: Any) -> Any:
    GRAPHS.append(graph)
    return graph.forward


def num_graphs(model: nn.Module) -> int:
    GRAPHS.clear()
    torch.compiler.reset()
    model(torch.ones(1, 2))
    return len(GRAPHS)


@WARNS
def test_compiling_is_what_the_newest_build_asked_for():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)])
    for wanted, expected in (({"backend": keep_graph}, 2), ({"backend": keep_graph}, 2), (False, 0), ({"disable": True}, 0), (False, 0)):
        compile_blocks(model, wanted)
        assert num_graphs(model) == expected
    assert all("forward" not in vars(module) for module in model.modules())


@WARNS
def test_both_together_and_each_alone_give_the_same_values():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)])
    plain = model(torch.ones(1, 2))
    for recompute, compiles in ((True, True), (True, False), (False, True), (True, True), (False, False)):
        checkpoint_activations(model, recompute)
        compile_blocks(model, compiles and {"backend": keep_graph})
        assert num_graphs(model) == 2 * compiles
        assert torch.allclose(model(torch.ones(1, 2)), plain)
    assert all("forward" not in vars(module) for module in model.modules())


def test_recomputing_is_undone_below_a_compiled_forward(model, calls):
    """Recomputing lies under compiling; neither is kept when the next build wants only the other."""
    for wanted, expected in ((True, 4), (False, 2), (True, 4)):
        checkpoint_activations(model, not wanted)
        compile_blocks(model, {"backend": keep_graph})
        checkpoint_activations(model, wanted)
        compile_blocks(model, False)
        assert num_forwards(model, calls) == expected


def test_a_stage_with_one_layer_has_a_block_too():
    """Contract 23: layers under their number are blocks even if alone, so that every stage of a pipeline recomputes."""
    layer = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    stage = nn.ModuleDict({"layers": nn.ModuleDict({"7": layer}), "head": nn.Linear(2, 2)})
    assert [name for name, _ in repeated_blocks(stage)] == ["layers.7"]
    assert repeated_blocks(nn.ModuleDict({"main": layer, "other": nn.Linear(2, 2)})) == []
    assert repeated_blocks(nn.ModuleDict({"0": nn.Linear(2, 2)})) == [], "without children there is nothing inside to recompute"


def test_a_stage_need_not_have_what_another_one_has(model, calls):
    """The names that no stage has are found over all of them; a whole model says at once what it lacks."""
    assert len(unmatched(model, ("0", "7", "8"))) == 2 and unmatched(model, True) == [] and unmatched(nn.Linear(1, 1), True)
    assert checkpoint_activations(model, ("0", "7"), is_whole=False) == ["0"] and num_forwards(model, calls) == 3
    with pytest.raises(ConfigurationError, match="no module is named '7'"):
        checkpoint_activations(model, ("0", "7"))
