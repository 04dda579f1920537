"""The two parts of a backward, against an ordinary backward of the same graph: values, matrix products, calls, hooks, memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from trainer_kit.pipeline.split_backward import SplitBackward

D = 8


class Product(torch.autograd.Function):
    """A matrix product that computes both gradients in one call, and frees what it saved, so that it can be called once only."""

    calls = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.saved = [x, w]
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        Product.calls += 1
        w, x = ctx.saved.pop(), ctx.saved.pop()
        return gradient @ w.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class Net(nn.Module):
    """Outputs: with and without a way to the inputs, views of one tensor, an input itself, some without a graph. A weight is used directly
    by four products, one of them written in Python, and a weight that is computed from it by two."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.wide = nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.Linear(D, 2 * D)
        self.w, self.c, self.own = nn.Parameter(torch.randn(D, D) / 3), nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(3, 3))
        self.norm, self.embedding, self.free = nn.LayerNorm(D), nn.Embedding(5, D), nn.Linear(3, 3)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.conv = nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x, y, ids):
        h = F.gelu(self.a(x)) + self.embedding(ids)
        h = Product.apply(h @ self.w, self.w)
        h = torch.tanh(h) @ self.w.t() @ self.w
        shared = torch.tanh(self.w @ self.w)
        h = F.relu(h @ shared) @ shared
        p, q = self.wide(self.norm(h + self.c)).chunk(2, -1)
        h = self.b(p) * torch.sigmoid(q * self.c)
        z = h.clone()
        z[..., 0] += self.c[0]
        z[:, 1].mul_(2)
        h, _ = self.attention(z, z, z, need_weights=False)
        h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        first, second, *_ = torch.cat([h, self.b(y)], -1).unbind(0)
        return [h * self.c, first, second[..., ::2], x, self.free(self.own), y.detach(), ids]


def run(split, *, frozen=(), through=None):
    """Two passes over new inputs. Returns the module, gradients of inputs and parameters, FLOPs of each part, hooks that fired."""
    torch.manual_seed(0)
    net = Net().double()
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    fired, flops = [], []
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
            parameter.register_hook(lambda gradient: gradient * 2)
    net.a.register_forward_hook(lambda _m, _i, output: output.register_hook(lambda gradient: fired.append("a") or gradient * 1.5) and None)
    Product.calls, of_inputs = 0, []
    for _ in range(2):
        x, y = (torch.randn(4, 6, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
        unused = torch.ones(1, dtype=torch.float64, requires_grad=True)
        ids = torch.randint(0, 5, (4, 6))
        outputs = net(x, y, ids) if through is None else through(net, x, y, ids, use_reentrant=False)
        outputs = [output for output in outputs if output.requires_grad]
        starts = [torch.randn_like(output) for output in outputs]
        if split:
            parts = SplitBackward([get_gradient_edge(output) for output in outputs], [x, y, unused])
            first = counted(lambda parts=parts, starts=starts: of_inputs.append(parts.of_inputs(starts)), through)
            assert all(parameter.grad is None for parameter in net.parameters()) or len(of_inputs) > 1
            flops.append((first, counted(parts.of_weights, through)))
        else:
            flops.append((counted(lambda outputs=outputs, starts=starts: torch.autograd.backward(outputs, starts), through), 0))
            of_inputs.append([x.grad, y.grad, unused.grad])
    return net, of_inputs, flops, fired, Product.calls


def counted(function, through):
    if through is not None:  # the counter hooks modules, which must not happen in a backward that runs forwards again
        return function() and 0
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("frozen", [(), ("a.weight", "w", "c"), ("b.weight", "wide.bias", "attention.in_proj_weight")])
def test_both_parts_are_one_backward(frozen):
    """Contract 23: exact, and as many products in both parts together as in one backward; each hook of a parameter fires once per pass."""
    one, split = run(False, frozen=frozen), run(True, frozen=frozen)
    for found, expected in zip(split[1], one[1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for name, parameter in one[0].named_parameters():
        found = split[0].get_parameter(name).grad
        assert (found is None) == (parameter.grad is None) == (name in frozen)
        if found is not None:
            torch.testing.assert_close(found, parameter.grad, rtol=1e-11, atol=1e-11)
    for (inputs, weights), (whole, _) in zip(split[2], one[2], strict=True):
        assert inputs + weights == whole and min(inputs, weights) > whole / 5
    assert sorted(split[3]) == sorted(one[3]) and split[4] == one[4] == 2


def test_with_checkpointing_it_is_exact_though_it_costs_more():
    """Contract 23: activations are computed again in both parts."""
    one, split = run(False, through=checkpoint), run(True, through=checkpoint)
    for found, expected in zip(split[1], one[1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for name, parameter in one[0].named_parameters():
        torch.testing.assert_close(split[0].get_parameter(name).grad, parameter.grad, rtol=1e-11, atol=1e-11)


def test_without_inputs_everything_is_left_to_the_second_part():
    layer = nn.Linear(2, 2)
    parts = SplitBackward([get_gradient_edge(layer(torch.ones(1, 2)).sum())], [])
    assert parts.of_inputs([torch.tensor(3.0)]) == [] and layer.bias.grad is None
    parts.of_weights()
    assert layer.bias.grad.tolist() == [3, 3]


def test_a_stage_may_pass_its_inputs_through_and_have_nothing_to_train():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    parts = SplitBackward([get_gradient_edge(t) for t in (x, x * 2, y)], [x, y])
    found = parts.of_inputs([torch.full((2,), value) for value in (1.0, 10.0, 100.0)])
    assert [gradient.tolist() for gradient in found] == [[21, 21], [100, 100]]
    parts.of_weights()
    assert x.grad is None


def test_gradients_accumulate_in_the_dtype_that_the_parameter_asks_for():
    """Contract 5."""
    layer = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    for value in (256.0, 1.0):
        x = torch.full((1, 2), value, dtype=torch.bfloat16, requires_grad=True)
        output = layer(x)
        parts = SplitBackward([get_gradient_edge(output)], [x])
        parts.of_inputs([torch.ones_like(output)])
        parts.of_weights()
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.tolist() == [[257, 257]]


class Token:
    """Something that a node saves, to see whether the node is alive."""


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_what_is_behind_the_last_branch_is_freed_after_the_first_part_and_the_rest_after_the_second():
    """Activations are freed as soon as they are used up."""
    gc.disable()
    try:
        layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
        early, late = Token(), Token()
        alive = [weakref.ref(early), weakref.ref(late)]
        output = Saves.apply(layer(Saves.apply(x, early)), late)
        del early, late
        parts = SplitBackward([get_gradient_edge(output)], [x])
        del output
        parts.of_inputs([torch.ones(1, 2)])
        assert [token() is not None for token in alive] == [True, False]
        parts.of_weights()
        assert [token() is not None for token in alive] == [False, False]
    finally:
        gc.enable()


def test_the_second_part_frees_layer_by_layer():
    """Gradients of parameters are added one layer after the other, and what a layer kept goes then."""
    gc.disable()
    try:
        layers, x, tokens, seen = [nn.Linear(2, 2) for _ in range(3)], torch.ones(1, 2, requires_grad=True), [], []
        hidden = x
        for layer in layers:
            hidden = layer(hidden) * 1
            tokens.append(weakref.ref(token := Token()))
            hidden.grad_fn.metadata["token"] = token
            layer.bias.register_hook(lambda _: seen.append([token() is not None for token in tokens]))
        del token
        parts = SplitBackward([get_gradient_edge(hidden)], [x])
        del hidden
        parts.of_inputs([torch.ones(1, 2)])
        parts.of_weights()
        assert seen == [[True, True, False], [True, False, False], [False, False, False]]
    finally:
        gc.enable()
