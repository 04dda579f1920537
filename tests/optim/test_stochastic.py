"""Stochastic rounding and its AdamW: bits against the neighbours, means against float32, torch's AdamW as the oracle."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_kit.mesh.layout import Layout
from trainer_kit.optim import StochasticAdamW, build_optimizer, stochastic_optimizer
from trainer_kit.optim.rounding import NoisePart, draw_noise, mix, round_stochastically

CPU = torch.device("cpu")


def run(optimizer, parameters, steps, *, first=0, grad_dtype=None):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad_dtype = grad_dtype or parameter.dtype
            parameter.grad = gradient.to(parameter.grad_dtype)
        optimizer.step()


def make(dtype, num=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(5, 7, generator=generator).to(dtype)) for _ in range(num)]


def named(parameters):
    return [(f"layers.{index}.weight", parameter) for index, parameter in enumerate(parameters)]


def whole_layout(shape):
    return Layout(shape, (0,) * len(shape), shape)


def noise_of(layout, key=5):
    return draw_noise([NoisePart(layout)], [key], CPU)


def test_rounding_gives_a_neighbour_and_is_right_on_average():
    """B108."""
    value = torch.tensor([1.0 + 2**-7 * 0.3, -3.0 - 2**-6 * 0.75, 1e-3, 0.0, 1.5])
    num = 200_000
    values = value.repeat_interleave(num)
    rounded = round_stochastically(values, noise_of(whole_layout((5, num)))).view(5, num)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert rounded[0].unique().tolist() == [1.0, 1.0 + 2**-7]
    assert rounded[1].unique().tolist() == [-3.0 - 2**-6, -3.0]
    assert rounded[3].unique().tolist() == [0.0]
    assert rounded[4].unique().tolist() == [1.5]
    step = torch.tensor([2**-7, 2**-6, 2**-17])
    error = (rounded[:3].double().mean(1) - value[:3].double()).abs()
    assert (error < 5 * 0.5 * step / num**0.5).all()  # five deviations of a mean of coins at most half a step wide


def test_rounding_keeps_inf_and_nan_of_any_bits():
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000], dtype=torch.int32)
    values = bits.view(torch.float32).repeat(1000)
    rounded = round_stochastically(values, noise_of(whole_layout((5000,)))).bfloat16().float().view(1000, 5)
    assert rounded[:, :3].isnan().all()
    assert (rounded[:, 3] == torch.inf).all()
    assert (rounded[:, 4] == -torch.inf).all()


def splitmix64(state):
    """Steele, Lea, Flood 2014, as its authors publish it."""
    mask = 2**64 - 1
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def test_the_noise_is_that_of_splitmix64():
    """Each number of 64 bits gives four, from the lowest bits up; a row of 6 columns takes two numbers."""
    noise = noise_of(whole_layout((3, 6)), key=2**64 - 7).view(3, 6)
    for row in range(3):
        for column in range(6):
            draw = splitmix64((2**64 - 7 + (2 * row + column // 4) * 0x9E3779B97F4A7C15) & (2**64 - 1))
            assert noise[row, column].item() % 2**16 == draw >> 16 * (column % 4) & 0xFFFF
    assert mix(123, 1) == splitmix64(123 + 0x9E3779B97F4A7C15)


def test_the_noise_is_even_and_neighbours_are_unrelated():
    """Deviations of at most five standard errors, in rows, columns and steps."""
    num = 2**18
    noise = torch.stack([noise_of(whole_layout((512, 512)), key=mix(9, step)) for step in (1, 2)]).double().view(2, 512, 512) + 0.5
    assert noise.mean().abs() < 5 * 2**16 / 12**0.5 / (2 * num) ** 0.5
    unit = noise / (2**16 / 12**0.5)
    for one, other in ((unit[:, 1:], unit[:, :-1]), (unit[..., 1:], unit[..., :-1]), (unit[0], unit[1])):
        assert (one * other).mean().abs() < 5 / one.numel() ** 0.5
    counts = torch.bincount((noise.view(-1) + 2**15).long() >> 8, minlength=256).double()
    assert ((counts - 2 * num / 256) ** 2 / (2 * num / 256)).sum() < 256 + 5 * (2 * 256) ** 0.5


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes"),
    [
        ((7,), (3,), (4,)), ((7,), (7,), (0,)), ((8, 8), (4, 0), (4, 8)), ((5, 6), (3, 0), (2, 6)), ((5, 6), (0, 3), (5, 3)),
        ((5, 9), (2, 5), (3, 4)), ((4, 3, 5), (1, 0, 0), (2, 3, 5)), ((4, 3, 5), (1, 1, 2), (2, 2, 3)), ((4, 3, 8), (0, 2, 0), (4, 1, 8)),
        ((4, 3), (4, 0), (0, 3)), ((), (), ()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("slice_elements", [3, 10, 1000])
def test_the_noise_of_a_part_is_the_part_of_the_noise(shape, offsets, sizes, slice_elements):
    """An element gets the same noise on any mesh, and in any slices."""
    part = Layout(shape, offsets, sizes)
    slices = list(NoisePart(part).split(slice_elements))
    noise = draw_noise(slices, [5] * len(slices), CPU)
    assert torch.equal(noise.view(sizes), noise_of(whole_layout(shape)).view(shape)[part.box])
    assert all(found.numel <= slice_elements for found in slices)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_small_updates_move_bf16_weights_on_average(state_dtype):
    """B108: 100 updates of 1e-4 from 1.0 give 0.99; rounding to nearest would stay at 1.0."""
    weight = nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = build_optimizer(StochasticAdamW(lr=1e-4, weight_decay=0.0, state_dtype=state_dtype), [("w", weight)])
    for _ in range(100):
        weight.grad = torch.ones_like(weight)  # Adam's update is then lr in every step
        optimizer.step()
    assert weight.double().mean().item() == pytest.approx(0.99, abs=3e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_parity_with_torch(dtype):
    ours, plain = make(dtype), make(dtype)
    optimizer = build_optimizer(StochasticAdamW(lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)), named(ours))
    run(optimizer, ours, 10)
    run(torch.optim.AdamW(plain, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), foreach=False), plain, 10)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert torch.equal(optimizer.state[a]["exp_avg"].to(dtype), optimizer.state[a]["exp_avg"])


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_one_bf16_update_is_a_neighbour_of_the_float32_update(grad_dtype):
    low = make(torch.bfloat16)
    full = [nn.Parameter(parameter.detach().float()) for parameter in low]
    optimizer = build_optimizer(StochasticAdamW(lr=0.01), named(low))
    assert optimizer.accepts_fp32_gradients
    run(optimizer, low, 1, grad_dtype=grad_dtype)
    for index, parameter in enumerate(full):
        assert low[index].grad is not None
        parameter.grad = low[index].grad.float()
    torch.optim.AdamW(full, lr=0.01, foreach=False).step()
    for a, b in zip(low, full, strict=True):
        difference = (a.float() - b).abs()
        assert (difference < 2.0**-7 * b.abs() + 1e-6).all()
        assert difference.max() > 0


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_runs_and_resumed_runs_are_bitwise_equal_and_leave_the_global_generator_alone(state_dtype):
    def start():
        parameters = make(torch.bfloat16)
        return build_optimizer(StochasticAdamW(lr=0.01, state_dtype=state_dtype, seed=7), named(parameters)), parameters

    before = torch.get_rng_state()
    straight, expected = start()
    run(straight, expected, 6)
    assert torch.equal(torch.get_rng_state(), before)
    first, halfway = start()
    run(first, halfway, 3)
    torch.manual_seed(99)
    second, resumed = start()
    for old, new in zip(halfway, resumed, strict=True):
        new.data.copy_(old)
        second.state[new] = copy.deepcopy(first.state[old])
    run(second, resumed, 3, first=3)
    for a, b in zip(expected, resumed, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(straight.state[a]["exp_avg_sq"], second.state[b]["exp_avg_sq"])


def test_noise_depends_on_seed_and_name_not_on_other_parameters():
    def update(seed, names):
        parameters = [nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)) for _ in names]
        optimizer = build_optimizer(StochasticAdamW(lr=1e-3, seed=seed), list(zip(names, parameters, strict=True)))
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return dict(zip(names, parameters, strict=True))

    both = update(0, ["a", "b"])
    assert torch.equal(both["b"], update(0, ["b"])["b"])
    assert not torch.equal(both["a"], both["b"])
    assert not torch.equal(both["a"], update(1, ["a"])["a"])


def test_portions_and_slices_change_nothing_in_float32_and_cover_every_element(monkeypatch):
    whole, sliced = make(torch.float32), make(torch.float32)
    run(build_optimizer(StochasticAdamW(lr=0.01), named(whole)), whole, 3)
    monkeypatch.setitem(stochastic_optimizer.PORTION_ELEMENTS, "cpu", 8)
    run(build_optimizer(StochasticAdamW(lr=0.01), named(sliced)), sliced, 3)
    for a, b in zip(whole, sliced, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    low = make(torch.bfloat16)
    start = [parameter.detach().clone() for parameter in low]
    run(build_optimizer(StochasticAdamW(lr=0.5), named(low)), low, 1)
    assert all((a != b).all() for a, b in zip(low, start, strict=True))


def test_portions_and_slices_do_not_change_the_noise(monkeypatch):
    whole, sliced = make(torch.bfloat16), make(torch.bfloat16)
    run(build_optimizer(StochasticAdamW(lr=0.01, state_dtype="bf16"), named(whole)), whole, 3)
    monkeypatch.setitem(stochastic_optimizer.PORTION_ELEMENTS, "cpu", 8)
    run(build_optimizer(StochasticAdamW(lr=0.01, state_dtype="bf16"), named(sliced)), sliced, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole, sliced, strict=True))


def test_a_parameter_without_gradient_stays_and_layouts_mix():
    parameters = [
        nn.Parameter(torch.ones(4, 3).t().to(torch.bfloat16)),
        nn.Parameter(torch.ones(2, 2)),
        nn.Parameter(torch.ones(0, 3, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
    ]
    optimizer = build_optimizer(StochasticAdamW(lr=0.5, weight_decay=0.0, state_dtype="bf16"), named(parameters))
    for parameter in parameters[:3]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(parameters[0].float(), torch.full((3, 4), 0.5))
    assert torch.allclose(parameters[1], torch.full((2, 2), 0.5))
    assert torch.equal(parameters[3].float(), torch.ones(3))
    assert parameters[3] not in optimizer.state


class NoHostValues(TorchDispatchMode):
    """Fails where a value is brought to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_no_value():
    """Contract 44."""
    parameters = [*make(torch.bfloat16), *make(torch.float32)]
    optimizer = build_optimizer(StochasticAdamW(state_dtype="bf16"), named(parameters))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with NoHostValues():
        optimizer.step()
        optimizer.step()
