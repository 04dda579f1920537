"""When Evaluate asks for evaluations."""

from trainer_kit.callbacks import Evaluate


def evaluations(trainer):
    return [arguments["name"] for kind, arguments in trainer.requests if kind == "evaluate"]


def run(trainer, callback, steps, resumed=False):
    trainer.start(callback, resumed=resumed)
    trainer.requests_at_start = len(trainer.requests)
    for _ in range(steps):
        trainer.finish_step(callback)
    trainer.end(callback)


def test_every_k_steps_and_at_the_end_once(fake_trainer):
    """B73: the last step is evaluated by a request, which comes before the save of that step; never twice."""
    for total, expected in ((7, 3), (6, 2)):
        trainer = fake_trainer(total_steps=total)
        run(trainer, Evaluate([1], every=3), total)
        assert evaluations(trainer) == ["val"] * expected


def test_an_early_end_is_evaluated(fake_trainer):
    """B81: with the normal end."""
    trainer = fake_trainer(total_steps=100)
    run(trainer, Evaluate([1], every=3, name="test"), 4)
    assert evaluations(trainer) == ["test", "test"]


def test_without_steps_nothing_is_evaluated(fake_trainer):
    """Contract 32."""
    trainer = fake_trainer(step=6, total_steps=6)
    run(trainer, Evaluate([1], every=3), 0)
    assert evaluations(trainer) == []


def test_at_start_is_before_the_first_step_of_the_run_only(fake_trainer):
    """Contract 30b: a resume makes no second value of its step."""
    trainer = fake_trainer()
    run(trainer, Evaluate([1], at_start=True, at_end=False), 2)
    assert trainer.requests_at_start == 1 and evaluations(trainer) == ["val"]
    resumed = fake_trainer(step=2)
    run(resumed, Evaluate([1], at_start=True, at_end=False), 1, resumed=True)
    assert evaluations(resumed) == []


def test_the_state_says_which_step_was_evaluated(fake_trainer):
    trainer, callback = fake_trainer(total_steps=None), Evaluate([1], every=2)
    run(trainer, callback, 2)
    again = Evaluate([1], every=2)
    again.load_state_dict(callback.state_dict())
    assert again.state_dict() == {"evaluated": 2}
