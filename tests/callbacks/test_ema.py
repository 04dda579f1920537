"""EMA against the formula, its state, and what it leaves of the weights."""

import pytest
import torch

from trainer_kit import events
from trainer_kit.callbacks import EMA
from trainer_kit.exceptions import ConfigurationError, StateError


def built(fake_trainer, model, **arguments):
    trainer, callback = fake_trainer(model=model), EMA(**arguments)
    callback.on_build_end(events.BuildEnd(trainer=trainer, durations={}))
    return trainer, callback


def step(trainer, callback, change=1.0):
    with torch.no_grad():
        for parameter in trainer.stages[0].parameters():
            parameter.add_(change)
    callback.on_optimizer_step(events.OptimizerStep(trainer=trainer, step=trainer.step))
    trainer.step += 1


def test_the_average_follows_the_formula(fake_trainer):
    """Closed form: weights 0, 1, 2, 3 and decay 0.5 give 0.5 * (0.5 * (0.5 * 0 + 0.5 * 1) + 0.5 * 2) + 0.5 * 3."""
    model = torch.nn.ParameterList([torch.zeros(2, dtype=torch.float64)])
    trainer, callback = built(fake_trainer, model, decay=0.5)
    for _ in range(3):
        step(trainer, callback)
    expected = 0.5 * (0.5 * (0.5 * 0 + 0.5 * 1) + 0.5 * 2) + 0.5 * 3
    assert callback.averages["0"].tolist() == [expected] * 2


def test_every_and_warmup(fake_trainer):
    model = torch.nn.ParameterList([torch.zeros(1, dtype=torch.float64)])
    trainer, callback = built(fake_trainer, model, decay=0.9, every=2, warmup=True)
    for _ in range(5):
        step(trainer, callback)
    first = (1 - 2 / 11) * 2  # the first step of the average, at weight 2, with decay 2 / 11
    expected = 3 / 12 * first + (1 - 3 / 12) * 4  # the second, at weight 4, with decay 3 / 12
    assert callback.averages["0"].item() == pytest.approx(expected, rel=1e-12)
    assert callback.num_updates == 2


def test_averages_of_bf16_parameters_are_fp32(fake_trainer):
    """B108: at decay 0.999 a bf16 average would not move at all."""
    model = torch.nn.ParameterList([torch.ones(4, dtype=torch.bfloat16), torch.ones(2)])
    trainer, callback = built(fake_trainer, model, decay=0.999)
    for _ in range(10):
        step(trainer, callback, change=0.0)
    with torch.no_grad():
        model[0].fill_(2.0)
    step(trainer, callback, change=0.0)
    assert callback.averages["0"].dtype == torch.float32
    assert callback.averages["0"][0].item() == pytest.approx(0.999 * 1 + 0.001 * 2, rel=1e-6)


def test_evaluation_sees_the_averages_and_leaves_every_bit_and_storage(fake_trainer):
    model = torch.nn.Linear(3, 2)
    trainer, callback = built(fake_trainer, model, decay=0.5)
    step(trainer, callback)
    before = {n: (p, p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}
    callback.on_evaluate_start(events.EvaluateStart(trainer=trainer))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, callback.averages[name]) and not torch.equal(parameter, before[name][2])
    callback.on_evaluate_end(events.EvaluateEnd(trainer=trainer, values={}))
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and parameter.data_ptr() == before[name][1] and torch.equal(parameter, before[name][2])


@pytest.mark.parametrize("way_out", ["on_exception", "close", "on_fit_start", "on_predict_start"])
def test_a_failed_evaluation_does_not_leave_the_averages_in(fake_trainer, way_out):
    """Contract 42."""
    model = torch.nn.Linear(3, 2)
    trainer, callback = built(fake_trainer, model, decay=0.5)
    step(trainer, callback)
    before = model.weight.detach().clone()
    callback.on_evaluate_start(events.EvaluateStart(trainer=trainer))
    getattr(callback, way_out)(*[] if way_out == "close" else [None])
    assert torch.equal(model.weight, before)


def test_applied_nests_with_evaluation_and_survives_an_error(fake_trainer):
    model = torch.nn.Linear(3, 2)
    trainer, callback = built(fake_trainer, model, decay=0.5)
    step(trainer, callback)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="mine"), callback.applied(trainer):
        callback.on_evaluate_start(events.EvaluateStart(trainer=trainer))
        callback.on_evaluate_end(events.EvaluateEnd(trainer=trainer, values={}))
        assert torch.equal(model.weight, callback.averages["weight"])
        raise RuntimeError("mine")
    assert torch.equal(model.weight, before)


def test_without_averages_applied_says_what_to_do(fake_trainer):
    with pytest.raises(StateError, match=r"trainer.build\(\)"), EMA().applied(fake_trainer()):
        pass


def test_evaluate_with_ema_can_be_off(fake_trainer):
    model = torch.nn.Linear(3, 2)
    trainer, callback = built(fake_trainer, model, decay=0.5, evaluate_with_ema=False)
    step(trainer, callback)
    before = model.weight.detach().clone()
    callback.on_evaluate_start(events.EvaluateStart(trainer=trainer))
    assert torch.equal(model.weight, before)


def test_tied_weights_count_once_and_frozen_ones_not(fake_trainer):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    _, callback = built(fake_trainer, model)
    assert list(callback.averages) == ["0.weight"]


def test_state_goes_on_bitwise(fake_trainer):
    """B19's rule for every copy of the weights: 3 + 3 steps equal 6."""
    straight = built(fake_trainer, torch.nn.ParameterList([torch.full((3,), 0.1)]), decay=0.9, warmup=True, every=2)
    for _ in range(6):
        step(*straight, change=0.37)
    first = built(fake_trainer, torch.nn.ParameterList([torch.full((3,), 0.1)]), decay=0.9, warmup=True, every=2)
    for _ in range(3):
        step(*first, change=0.37)
    state = {key: {k: t.clone() for k, t in v.items()} if isinstance(v, dict) else v for key, v in first[1].state_dict().items()}
    model = torch.nn.ParameterList([first[0].stages[0][0].detach().clone()])
    second = built(fake_trainer, model, decay=0.9, warmup=True, every=2)
    second[1].load_state_dict(state)
    second[1].on_checkpoint_loaded(events.CheckpointLoaded(trainer=second[0], path="p", step=3, parts=("model",)))
    for _ in range(3):
        step(*second, change=0.37)
    assert torch.equal(second[1].averages["0"], straight[1].averages["0"])


def test_a_checkpoint_from_before_ema_was_used_starts_the_average_at_its_weights(fake_trainer):
    model = torch.nn.ParameterList([torch.zeros(2)])
    trainer, callback = built(fake_trainer, model)
    with torch.no_grad():
        model[0].fill_(5.0)
    callback.on_checkpoint_loaded(events.CheckpointLoaded(trainer=trainer, path="p", step=3, parts=("model",)))
    assert callback.averages["0"].tolist() == [5.0, 5.0]


def test_state_of_another_model_is_refused(fake_trainer):
    _, callback = built(fake_trainer, torch.nn.Linear(3, 2))
    _, other = built(fake_trainer, torch.nn.Linear(3, 2, bias=False))
    with pytest.raises(ConfigurationError, match="bias"):
        callback.load_state_dict(other.state_dict())
    _, larger = built(fake_trainer, torch.nn.Linear(4, 2))
    with pytest.raises(ConfigurationError, match=r"weight.*\(2, 4\).*\(2, 3\)"):
        callback.load_state_dict(larger.state_dict())
