"""`parallelize_tensor`: gradients of every style and combination against one process, contracts, random numbers, errors."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.common import (
    CountCollectives,
    decoder,
    gradients,
    largest_difference,
    make_mesh,
    token_loss,
    tokens,
    whole_gradients,
)
from trainer_kit.exceptions import ConfigurationError, ModelError, UnsupportedError
from trainer_kit.mesh.contracts import contracts_of
from trainer_kit.mesh.layout import is_distributed
from trainer_kit.model.transforms import checkpoint_activations
from trainer_kit.parallel import parallelize_fsdp, parallelize_hsdp, parallelize_tensor
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import whole_tensor


def without_sequence(plan):
    return {name: style for name, style in plan.items() if style != "sequence"}


def decoder_job(shape, is_sequence, options):
    """A decoder on a mesh; the largest relative difference of loss and of gradients to one process."""
    mesh, model = make_mesh(**shape), decoder(**options)
    data_rank = dist.get_rank() // shape["tp"]
    num_data_ranks = dist.get_world_size() // shape["tp"]
    expected = gradients(model, [lambda model, r=r: token_loss(model, tokens(r)) for r in range(num_data_ranks)])
    expected_loss = token_loss(model, tokens(data_rank)).item()
    plan = model.tensor_plan(shape["tp"])
    parallelize_tensor(model, mesh["tp"], plan if is_sequence else without_sequence(plan))
    if "replicate" in shape:
        for block in model.layers.values():
            parallelize_hsdp(block, mesh["replicate", "shard"])
        parallelize_hsdp(model, mesh["replicate", "shard"])
    elif "shard" in shape:
        for block in model.layers.values():
            parallelize_fsdp(block, mesh["shard"])
        parallelize_fsdp(model, mesh["shard"])
    loss = token_loss(model, tokens(data_rank))
    loss.backward()
    found = whole_gradients(model, mesh)
    return abs(loss.item() - expected_loss), largest_difference(found, expected)


@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("tie", [False, True])
def test_gradients_of_a_decoder_are_those_of_one_process(is_sequence, tie):
    """Contract 1, B120: norms under tp with and without sequence parallelism; an uneven vocabulary, tied and not."""
    for found in run_on_ranks(2, decoder_job, {"tp": 2}, is_sequence, {"tie_embeddings": tie}):
        assert max(found) < 1e-12


@pytest.mark.parametrize("is_sequence", [False, True])
def test_tensor_parallelism_inside_of_fsdp(is_sequence):
    """DTensor shards are cut again, plain parameters along the data dimension alone."""
    for found in run_on_ranks(4, decoder_job, {"shard": 2, "tp": 2}, is_sequence, {"tie_embeddings": True}):
        assert max(found) < 1e-12


def test_tensor_parallelism_inside_of_hsdp():
    """Replicas of shards of tensor groups, 2 x 2 x 2."""
    for found in run_on_ranks(8, decoder_job, {"replicate": 2, "shard": 2, "tp": 2}, True, {"tie_embeddings": True}):
        assert max(found) < 1e-12


class Biased(nn.Module):
    """Every style with a bias, and an embedding with a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=7)
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        x = self.embedding(ids)
        x += 1.0  # in place, as on one process
        return self.head(x + self.inner(self.norm(x)))


BIASED_PLAN = {"embedding": "vocabulary", "norm": "sequence", "inner.0": "column", "inner.2": "row", "head": "vocabulary"}


def biased_job(names):
    mesh = make_mesh(tp=dist.get_world_size())
    torch.manual_seed(0)
    model = Biased().double()
    expected = gradients(model, [lambda model: token_loss(model, tokens(0))])
    parallelize_tensor(model, mesh, {name: BIASED_PLAN[name] for name in names})
    token_loss(model, tokens(0)).backward()
    return largest_difference(whole_gradients(model, mesh), expected)


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, ["inner.0", "inner.2"]),
        (2, ["embedding"]),
        (2, ["head"]),
        (3, list(BIASED_PLAN)),
        (2, ["embedding", "inner.0", "inner.2", "head"]),
    ],
)
def test_each_style_alone_and_with_others(num_ranks, names):
    """Contract 1: biases are cut or added once, a padding row gets no gradient, a vocabulary of 11 is cut in 4, 4 and 3."""
    assert max(run_on_ranks(num_ranks, biased_job, names)) < 1e-12


def contracts_job(is_sequence):
    mesh, model = make_mesh(tp=2), decoder(tie_embeddings=True)
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    plan = model.tensor_plan(2)
    for parameter in model.parameters():
        parameter.mark = "mine"
    parallelize_tensor(model, mesh, plan if is_sequence else without_sequence(plan))
    assert model.head.weight is model.embedding.weight
    assert all(parameter.shape == before[name] and parameter.mark == "mine" for name, parameter in model.named_parameters())
    assert model.embedding.weight.to_local().untyped_storage().nbytes() <= 6 * 8 * 8, "a part keeps the memory of the whole"
    return {name: (contracts_of(parameter)["tp"].kind, is_distributed(parameter)) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("is_sequence", [False, True])
def test_contracts_of_a_plan(is_sequence):
    """Contract 1: a replicated norm has a complete gradient with whole activations, a partial one with parts of the sequence."""
    for found in run_on_ranks(2, contracts_job, is_sequence):
        norms = {found[name] for name in found if "norm" in name}
        assert norms == {("partial" if is_sequence else "complete", False)}
        assert {found[name] for name in found if "norm" not in name} == {("complete", True)}


def steps_job():
    """Three steps of SGD: the norms of this rank, and how far all parameters are from one process."""
    mesh, model = make_mesh(tp=2), decoder()
    alone = copy.deepcopy(model)
    parallelize_tensor(model, mesh, model.tensor_plan(2))
    for step in range(3):
        for trained in (alone, model):
            token_loss(trained, tokens(step)).backward()
        found = whole_gradients(model, mesh)
        with torch.no_grad():
            for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
                gradient = parameter.grad if is_distributed(parameter) else found[name]
                parameter.sub_(gradient, alpha=0.01)
                other.sub_(other.grad, alpha=0.01)
                parameter.grad = other.grad = None
    whole = {name: whole_tensor(parameter.detach()) for name, parameter in model.named_parameters()}
    difference = largest_difference(whole, {name: parameter.detach() for name, parameter in alone.named_parameters()})
    return {name: parameter.detach() for name, parameter in model.named_parameters() if "norm" in name}, difference


def test_replicas_do_not_drift():
    """B120: norms on parts of the sequence are bitwise equal on the ranks after three steps, and equal to one process."""
    (first, difference), (second, _) = run_on_ranks(2, steps_job)
    assert difference < 1e-12
    assert len(first) == 5 and all(torch.equal(first[name], second[name]) for name in first)


def dropout_job(is_sequence, recompute):
    """Outputs of the blocks in training and evaluation, the gradients, and a number drawn after each."""
    mesh, model = make_mesh(tp=2), decoder(dropout=0.5)
    plan = model.tensor_plan(2)
    parallelize_tensor(model, mesh, plan if is_sequence else without_sequence(plan))
    checkpoint_activations(model, recompute)
    seen = []
    for block in model.layers.values():
        block.register_forward_hook(lambda _module, _args, output: seen.append(output.detach()))
    torch.manual_seed(1)
    token_loss(model, tokens(0)).backward()
    drawn = torch.rand(())
    model.eval()
    model(tokens(0))
    return seen, {name: whole_tensor(parameter.grad) for name, parameter in model.named_parameters()}, drawn, torch.rand(())


def test_random_numbers_of_replicated_activations_are_equal():
    """Contract 9b: dropout 0.5, tp 2: bitwise equal on the peers."""
    (first, *_), (second, *_) = run_on_ranks(2, dropout_job, False, False)
    assert len(first) == 4 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def zeros_job():
    """Where dropout on a part of the sequence puts zeros, on this rank."""
    mesh = make_mesh(tp=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
    parallelize_tensor(model, mesh, {"1": "sequence", "2": "sequence"})
    torch.manual_seed(1)
    first, second = model[1](torch.ones(64)), model[2](torch.ones(64))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(model[1](torch.ones(64)), first)
    return first


def test_random_numbers_of_parts_of_the_sequence_differ():
    """Contract 9b: different on the peers, for each module and call, and a function of the common stream."""
    first, second = run_on_ranks(2, zeros_job)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("is_sequence", [False, True])
def test_recomputed_activations_get_the_same_random_numbers(is_sequence):
    """Contract 9b, and the common stream goes on the same way on both ranks."""
    plain, recomputed = (run_on_ranks(2, dropout_job, is_sequence, recompute) for recompute in (False, True))
    for (outputs, found, *_), (expected_outputs, expected, *_) in zip(recomputed, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected_outputs, strict=True))
        assert largest_difference(found, expected) < 1e-12
    for runs in (plain, recomputed):
        assert runs[0][2:] == runs[1][2:]


def calls_job(is_sequence):
    """Collectives of a forward and of its backward, those of the loss left out."""
    mesh, model = make_mesh(tp=2), decoder()
    plan = model.tensor_plan(2)
    parallelize_tensor(model, mesh, plan if is_sequence else without_sequence(plan))
    with CountCollectives() as forward:
        output = model(tokens(0)).to_local().sum()
    with CountCollectives() as backward:
        output.backward()
    return forward.calls, backward.calls


def test_an_input_is_gathered_once_for_its_modules():
    """Gathered per parent: two attentions, two feed-forwards and the head; summed per row module and embedding."""
    for forward, backward in run_on_ranks(2, calls_job, True):
        assert (forward["all_gather"], forward["reduce_scatter"], forward["all_reduce"]) == (5, 5, 0)
        assert (backward["all_gather"], backward["reduce_scatter"], backward["all_reduce"]) == (5, 5, 0)
    for forward, backward in run_on_ranks(2, calls_job, False):
        assert (forward["all_gather"], forward["reduce_scatter"], forward["all_reduce"]) == (0, 0, 5)
        assert (backward["all_gather"], backward["reduce_scatter"], backward["all_reduce"]) == (0, 0, 5)


class Calls(nn.Module):
    """Calls its projection as the test says."""

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(4, 4)

    def forward(self, x, how):
        first = self.projection(x)
        if how == "raise":
            raise ArithmeticError
        if how == "change":
            x.add_(1.0)
        return first, self.projection(x)


def kept_job():
    """What `SharedInputs` must not do: give an input as it was before, or keep it when the forward is over."""
    model = nn.Sequential(Calls(), nn.Identity())
    parallelize_tensor(model, make_mesh(tp=2), {"0.projection": "column", "1": "sequence"})
    x = torch.ones(2, 3, 4)
    with CountCollectives() as count:
        first, second = model[0](x, "change")
    assert not torch.equal(first, second) and count.calls["all_gather"] == 2
    x = torch.ones(2, 3, 4, requires_grad=True)
    with pytest.raises(ArithmeticError):
        model[0](x, "raise")
    alive = weakref.ref(x)
    del x, first, second
    gc.collect()
    assert alive() is None
    return model[0].projection(torch.ones(2, 3, 4)).shape  # not through its parent


def test_inputs_are_kept_during_a_forward_alone():
    assert run_on_ranks(2, kept_job) == 2 * [(2, 6, 2)]


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def refusals_job():
    mesh = make_mesh(tp=2)

    def refuse(error, text, plan, module=None):
        with pytest.raises(error, match=text):
            parallelize_tensor(module or Biased(), mesh, plan)

    refuse(ConfigurationError, "plan\\['innr.0'\\] .* matches no submodule of Biased; did you mean 'inner.0'", {"innr.0": "column"})
    refuse(ConfigurationError, "'colum', not a style; did you mean 'column'", {"inner.0": "colum"})
    refuse(ConfigurationError, "gives 'inner.0' two styles, 'column' and 'row'", {"inner.0": "column", "inner.*0": "row"})
    refuse(ConfigurationError, "'norm' is 'column', but it is a LayerNorm, expected a Linear", {"norm": "column"})
    refuse(ConfigurationError, "'embedding' is 'row', but it is a Embedding", {"embedding": "row"})
    refuse(ConfigurationError, "names 'inner' \"sequence\" and 'inner.0' inside of it", {"inner": "sequence", "inner.0": "column"})
    refuse(ModelError, "its weight has size 5 along dim 1, .* expected a multiple of 2", {"0": "row"}, nn.Sequential(nn.Linear(5, 4)))
    refuse(ModelError, "size 1 along dim 0, .* expected at least 2", {"0": "column"}, nn.Sequential(nn.Linear(4, 1)))
    refuse(UnsupportedError, "OwnForward has a forward or a parametrized weight", {"0": "column"}, nn.Sequential(OwnForward(4, 4)))
    refuse(UnsupportedError, "sparse, max_norm or scale_grad", {"0": "vocabulary"}, nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)))
    parametrized = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    refuse(UnsupportedError, "parametrized weight", {"0": "column"}, parametrized)
    tied = decoder(tie_embeddings=True)
    refuse(ConfigurationError, "'embedding': 'vocabulary', 'head': not named", {"embedding": "vocabulary"}, tied)
    with pytest.raises(UnsupportedError, match=r"DecoderConfig\(num_kv_heads=2\) is cut over tp=4 ranks"):
        decoder().tensor_plan(4)
    twice = nn.Sequential(nn.Linear(4, 4))
    parallelize_tensor(twice, mesh, {"0": "column"})
    refuse(ModelError, "distributed already", {"0": "column"}, twice)
    with pytest.raises(ConfigurationError, match="1 named dimension"):
        parallelize_tensor(Biased(), make_mesh(a=1, b=2), {"head": "vocabulary"})


def test_a_plan_that_does_not_fit_is_an_error():
    """Contract 14: found before anything is changed."""
    run_on_ranks(2, refusals_job)


def inputs_job():
    mesh, model = make_mesh(tp=2), decoder()
    parallelize_tensor(model, mesh, model.tensor_plan(2))
    with pytest.raises(ModelError, match=r"shape \(2, 5, 8\) cannot be cut .* T a multiple of 2"):
        model(tokens(0, length=5))
    with pytest.raises(ModelError, match='a "row" Linear of 8 inputs takes the 4 of its rank, but got 8'):
        model.layers["0"].attention.o_proj(torch.ones(2, 6, 8, dtype=torch.float64))
    with pytest.raises(IndexError):  # as on one process, and on every rank
        model.embedding(torch.tensor([[0, 11]]))
    with pytest.raises(IndexError):
        model.embedding(torch.tensor([[0, -1]]))


def test_activations_that_do_not_fit_are_errors():
    run_on_ranks(2, inputs_job)
