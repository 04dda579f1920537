"""Mixtures of experts: routing, grouped products, counts, the balance of a router by loss and by bias."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.support import quiet_trainer
from trainer_kit import Callback, CausalLMTask
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.model import StageInfo, build_stage
from trainer_kit.models import Decoder, DecoderConfig, DecoderProvider, MoEConfig, RouterBias, num_flops_per_token
from trainer_kit.models.experts import (
    GroupedExperts,
    MixtureOfExperts,
    Router,
    can_group,
    dispatch_here,
    grouped_linear,
    loop_over_groups,
)
from trainer_kit.models.load_balance import load_balancing_loss, tokens_per_expert

MOE = MoEConfig(num_experts=8, num_experts_per_token=2, intermediate_size=12)
CONFIG = DecoderConfig(
    vocab_size=11, num_layers=3, num_heads=2, hidden_size=16, head_size=6, intermediate_size=20, max_seq_len=12, qk_norm=True, moe=MOE
)
IDS = torch.randint(0, 11, (4, 12), generator=torch.Generator().manual_seed(0))


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 0, 7], [0, 0, 0, 0]])
def test_grouped_products_and_the_loop_are_equal(dtype, sizes):
    """Groups without rows too; their weights have a gradient of zeros."""
    x, weight = random(sum(sizes), 16, dtype=dtype), random(4, 24, 16, dtype=dtype, seed=1)
    ends = torch.tensor(sizes).cumsum(0)
    assert can_group(x, weight)
    gradient = random(sum(sizes), 24, dtype=dtype, seed=2).detach()
    results = []
    for function in (grouped_linear, loop_over_groups):
        y = function(x, weight, ends)
        results.append((y, *torch.autograd.grad(y, (x, weight), gradient)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert [bool(part.any()) for part in results[0][2]] == [size > 0 for size in sizes]


@pytest.mark.parametrize("change", [{"dtype": torch.float64}, {"width": 6}, {"out": 5}])
def test_what_cannot_be_grouped_is_looped(change):
    dtype, width, out = change.get("dtype", torch.float32), change.get("width", 16), change.get("out", 8)
    x, weight = random(9, width, dtype=dtype), random(2, out, width, dtype=dtype, seed=1)
    assert not can_group(x, weight)
    expected = torch.cat((x[:4] @ weight[0].T, x[4:] @ weight[1].T))
    torch.testing.assert_close(grouped_linear(x, weight, torch.tensor([4, 9])), expected)


def test_autocast_computes_grouped_products_as_it_does_linear_ones():
    x, weight = random(9, 16), random(2, 8, 16, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_linear(x, weight, torch.tensor([4, 9]))
        assert torch.equal(y, torch.cat((F.linear(x[:4], weight[0]), F.linear(x[4:], weight[1]))))
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("normalizes", [False, True])
def test_each_token_is_a_weighted_sum_over_its_experts(normalizes):
    """Against every expert for every token."""
    moe = replace(MOE, normalize_weights=normalizes)
    torch.manual_seed(0)
    router, experts = Router(16, moe, 1.0), GroupedExperts(16, moe, 0.3, 0.3)
    x = random(20, 16)
    probabilities = F.linear(x, router.weight).softmax(-1)
    weights = torch.where(probabilities >= probabilities.topk(2).values[:, -1:], probabilities, 0.0)
    weights = weights / weights.sum(-1, keepdim=True) if normalizes else weights
    inner = F.silu(torch.einsum("nd,xfd->nxf", x, experts.gate_proj)) * torch.einsum("nd,xfd->nxf", x, experts.up_proj)
    expected = torch.einsum("nxf,xdf,nx->nd", inner, experts.down_proj, weights)
    torch.testing.assert_close(dispatch_here(x, router(x), experts), expected, rtol=1e-5, atol=1e-6)


def test_tokens_beyond_the_capacity_add_nothing_and_are_counted():
    """20 tokens at 2 of 8 experts, half of an even share: each expert takes the first 3."""
    torch.manual_seed(0)
    mixture = MixtureOfExperts(replace(CONFIG, moe=replace(MOE, capacity_factor=0.5), init_std=0.5), 0.5)
    x = random(2, 10, 16)
    chosen, _, _, kept = mixture.router(x.flatten(0, 1))
    taken = [min(3, int((chosen == expert).sum())) for expert in range(8)]
    assert torch.bincount(chosen[kept], minlength=8).tolist() == taken and not kept.all(-1).all()
    assert mixture.router.num_dropped == 40 - sum(taken)
    y = mixture(x).flatten(0, 1)
    assert mixture.router.num_dropped == 2 * (40 - sum(taken)) and not y[~kept.any(-1)].any()
    assert kept[0].all(), "the first token comes before all others"
    whole = MixtureOfExperts(replace(CONFIG, init_std=0.5), 0.5)
    whole.load_state_dict(mixture.state_dict())
    torch.testing.assert_close(y[kept.all(-1)], whole(x).flatten(0, 1)[kept.all(-1)])
    mixture.eval()(x)
    assert mixture.router.num_dropped == 2 * (40 - sum(taken))


def test_routers_of_a_bf16_model_decide_in_float32():
    router = Router(16, MOE, 1.0).bfloat16()
    assert router(random(5, 16, dtype=torch.bfloat16)).probabilities_NX.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, [True, True, True]), ({"every": 2}, [False, True, False]), ({"dense_layers": (0, 2)}, [False, True, False])],
)
def test_the_layers_with_experts(changes, expected):
    config = replace(CONFIG, moe=replace(MOE, **changes))
    assert [config.has_experts(layer) for layer in range(3)] == expected
    names = {name for name, _ in Decoder(config).named_parameters() if "feed_forward." in name}
    for layer, has_experts in enumerate(expected):
        assert (f"layers.{layer}.feed_forward.experts.gate_proj" in names) == has_experts
        assert (f"layers.{layer}.feed_forward.gate_proj.weight" in names) == (not has_experts)


@pytest.mark.parametrize(
    "changes",
    [{}, {"moe": replace(MOE, dense_layers=(1,)), "mlp_bias": True}, {"moe": None, "attention_bias": True}, {"tie_embeddings": True}],
)
def test_counts_of_parameters_and_arithmetic(changes):
    """Against the model, and against torch's counter: attention in full, the backward as two forwards."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = replace(CONFIG, **changes)
    model = Decoder(config).double()  # in fp64 experts are looped, and the counter knows products of matrices alone
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(IDS[:1])
    no_products = sum(p.numel() for name, p in model.named_parameters() if "norm" in name or name.endswith("bias"))
    assert num_flops_per_token(config, 12) == 3 * counter.get_total_flops() / 12 + 6 * no_products


def test_stages_share_the_layers_by_what_a_token_costs():
    """A wide dense layer costs more than seven of small experts."""
    config = replace(CONFIG, num_layers=8, intermediate_size=200, moe=replace(MOE, intermediate_size=4, dense_layers=(0,)))
    assert list(Decoder(config, StageInfo(0, 2)).layers) == ["0"]


def test_the_loss_is_smallest_when_experts_are_used_equally():
    """K at best; X when all tokens go to the same expert, with K = 1."""
    even = torch.full((8, 4), 0.25)
    assert load_balancing_loss(even, torch.arange(8)[:, None] % 4).item() == pytest.approx(1.0)
    one = torch.tensor([[1.0, 0, 0, 0]]).expand(8, 4)
    assert load_balancing_loss(one, torch.zeros(8, 1, dtype=torch.int64)).item() == pytest.approx(4.0)
    assert load_balancing_loss(even, torch.tensor([[0, 1], [2, 3]] * 4)).item() == pytest.approx(2.0)


class Counts(Callback):
    """The counts of the first router, before they are taken."""

    def __init__(self):
        self.seen = []

    def on_gradients_ready(self, event):
        self.seen.append(event.trainer.model.layers["0"].feed_forward.router.num_routed.clone())


def trained(moe, batches, callbacks=(), **options):
    provider = DecoderProvider(replace(CONFIG, moe=moe))
    trainer = quiet_trainer(provider, CausalLMTask(), batches, callbacks=callbacks, log_every=1, **options)
    trainer.fit()
    return trainer


def test_the_auxiliary_loss_is_a_part_of_the_loss():
    """Through `context.add_loss`: the mean over layers, times the coefficient."""
    coefficient = 0.5
    trainer = trained(replace(MOE, aux_loss_coef=coefficient), [IDS], total_steps=1)
    names = ("loss", "load_balancing")
    total, balance = (trainer.history.last(f"train/{name}")[1] for name in names)
    model = build_stage(DecoderProvider(CONFIG), trainer.context, seed=trainer.config.seed)
    found = []
    for layer in model.layers.values():
        layer.feed_forward.router.register_forward_hook(
            lambda _, __, routing: found.append(load_balancing_loss(routing.probabilities_NX, routing.chosen_NK))
        )
    logits = model(IDS)
    main = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert balance == pytest.approx(torch.stack(found).mean().item(), rel=1e-5)
    assert total == pytest.approx((main + coefficient * torch.stack(found).mean()).item(), rel=1e-5)


def test_biases_move_by_the_sign_of_the_load_once_per_step():
    """DeepSeek-V3: up for experts with less than the mean load, down for those with more, over all microbatches; padding is no load."""
    counts = Counts()
    mask = torch.ones_like(IDS).index_fill(0, torch.tensor([3]), 0)
    mask[3, 0] = 1
    batches = [{"input_ids": IDS, "attention_mask": mask}, {"input_ids": IDS.flip(0), "attention_mask": mask}]
    trainer = trained(replace(MOE, balance_bias=True), batches, [counts, RouterBias(0.01)], total_steps=1, accumulate=2)
    (load,) = counts.seen
    router = trainer.model.layers["0"].feed_forward.router
    assert load.sum() == 2 * 2 * (3 * 12 + 1)
    expected = 0.01 * torch.sign(load.double().mean() - load.double())
    torch.testing.assert_close(router.balance_bias, expected.float())
    assert not router.num_routed.any()
    assert {name for name in trainer.model.state_dict() if "balance_bias" in name or "num_routed" in name} == {
        f"layers.{layer}.feed_forward.router.balance_bias" for layer in range(3)
    }


@pytest.mark.parametrize("setting", [{"activation_checkpointing": True}, {"precision": "bf16-mixed"}, {"precision": "bf16"}], ids=str)
def test_settings_of_a_run_leave_the_balance_as_it_is(setting):
    """Routers that run again in the backward count again, and add no loss again."""
    moe, batches = replace(MOE, balance_bias=True, aux_loss_coef=0.1), [IDS, IDS.flip(0)]
    plain, other = (trained(moe, batches, [RouterBias(0.01)], total_steps=2, **options) for options in ({}, setting))
    exact = "precision" not in setting
    for name in ("loss", "load_balancing"):
        values = [trainer.history.last(f"train/{name}")[1] for trainer in (plain, other)]
        assert values[0] == pytest.approx(values[1], rel=1e-6 if exact else 1e-2)
    if exact:
        for name, value in plain.model.state_dict().items():
            assert torch.equal(value, other.model.get_buffer(name) if "bias" in name else other.model.get_parameter(name))


def test_biases_even_out_the_load():
    """From one expert that gets more than half to all of them within a factor of two."""
    moe = replace(MOE, balance_bias=True, num_experts_per_token=1)
    torch.manual_seed(0)
    router = Router(16, moe, 0.3)
    x = random(512, 16).detach()
    x[:, 0] = 3.0
    with torch.no_grad():
        router.weight[0, 0] = 1.0
    assert tokens_per_expert(router(x).chosen_NK, None, 8).max() > 256
    callback = RouterBias(0.005)
    callback._routers = [router]
    for _ in range(400):
        router.num_routed.copy_(tokens_per_expert(router(x).chosen_NK, None, 8))
        load = router.num_routed.clone()
        callback.on_optimizer_step(Event)
    assert load.max() <= 128 and load.min() >= 32, load


class Event:
    class trainer:
        class context:
            stage_group = None


def test_a_bias_chooses_and_does_not_weigh():
    router = Router(16, replace(MOE, balance_bias=True), 0.3)
    router.balance_bias[5] = 2.0
    x = random(6, 16)
    routing = router(x)
    assert bool((routing.chosen_NK == 5).any(-1).all())
    torch.testing.assert_close(routing.weights_NK, F.linear(x, router.weight).softmax(-1).gather(-1, routing.chosen_NK))


@pytest.mark.parametrize("moe", [replace(MOE, aux_loss_coef=0.1), replace(MOE, balance_bias=True)])
def test_a_balance_needs_the_context_of_the_run(moe, context):
    config = replace(CONFIG, moe=moe)
    with pytest.raises(ConfigurationError, match=r"DecoderProvider\(config\).*aux_loss_coef=0"):
        Decoder(config)
    Decoder(config, context=context)(IDS)


def test_a_bias_callback_without_a_router_is_refused():
    with pytest.raises(ConfigurationError, match=r"no router.*balance_bias=True"):
        trained(MOE, [IDS], [RouterBias()], total_steps=1)
    with pytest.raises(ConfigurationError, match="rate=2"):
        RouterBias(2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts_per_token": 9}, "num_experts_per_token=9.*num_experts=8"),
        ({"intermediate_size": 0}, "intermediate_size=0"),
        ({"every": 0}, "every=0"),
        ({"aux_loss_coef": -1.0}, "aux_loss_coef=-1.0"),
        ({"capacity_factor": -1.0}, "capacity_factor=-1.0"),
    ],
)
def test_wrong_settings_are_refused(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        replace(MOE, **changes)
