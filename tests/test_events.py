"""Events: which there are, in which order they come, and what each callback method hears."""

import inspect
import re
from dataclasses import dataclass

import pytest
import torch

from tests.support import MeanTask, Scalar, quiet_trainer
from trainer_kit import Callback, Event, events
from trainer_kit.callbacks import Checkpoint
from trainer_kit.exceptions import ConfigurationError


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def listener(log: list[str], **overrides):
    """A callback that writes down every event it hears."""
    methods = {name: (lambda self, event, name=name: log.append(name.removeprefix("on_"))) for name in events.builtin_events()}
    methods["close"] = lambda self: log.append("close")
    return type("Listener", (Callback,), methods | overrides)()


STEP = ["step_start", "forward_backward_start", "microbatch_end", "forward_backward_end", "gradients_ready", "before_optimizer_step"]
STEP += ["optimizer_step", "step_end"]
BUILD = ["build_start", "data_ready", "model_ready", "optimizer_ready", "lr_scheduler_ready", "build_end"]


def test_every_event_has_a_method_and_every_method_an_event():
    methods = {name for name in vars(Callback) if name.startswith("on_")}
    assert methods == set(events.builtin_events())
    for name, event_type in events.builtin_events().items():
        (parameter,) = list(inspect.signature(getattr(Callback, name)).parameters.values())[1:]
        assert parameter.annotation == f"events.{event_type.__name__}"


def test_every_event_stands_in_the_page_and_is_frozen():
    page = re.split(r"anywhere", events.__doc__)[0] + events.__doc__
    for event_type in events.builtin_events().values():
        assert event_type.__name__ in page, event_type
        assert event_type.__dataclass_params__.frozen and hasattr(event_type, "__slots__")


def test_each_part_is_there_when_its_event_comes():
    seen = []

    class Look(Callback):
        def on_model_ready(self, event):
            seen.append(type(event.trainer.model).__name__)

        def on_optimizer_ready(self, event):
            seen.append(type(event.trainer.optimizer).__name__)

        def on_lr_scheduler_ready(self, event):
            seen.append(event.trainer.lr_scheduler)

    quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[Look()]).build()
    assert seen == ["Scalar", "SGD", None]


def test_the_log_of_one_step():
    log: list[str] = []
    quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[listener(log)], log_every=1, log_delay=0).fit()
    assert log == [*BUILD, "fit_start", "epoch_start", *STEP, "metrics", "epoch_end", "fit_end", "close"]


def test_the_log_of_a_pack_of_two():
    """B77: one microbatch event per microbatch, strictly inside the pack."""
    log: list[str] = []
    quiet_trainer(Scalar(), MeanTask(), [t(1), t(2)], callbacks=[listener(log)], accumulate=2, log_every=5).fit()
    pack = STEP[:2] + ["microbatch_end", "microbatch_end"] + STEP[3:]
    assert log[len(BUILD) :] == ["fit_start", "epoch_start", *pack, "epoch_end", "metrics", "fit_end", "close"]


def test_events_are_paired_over_uneven_epochs():
    """B77: 7 microbatches in packs of 3 over 2 epochs: (start micro+ end)* with 3, 3, 1, 3, 3, 1 microbatches."""
    log: list[str] = []
    quiet_trainer(Scalar(), MeanTask(), [t(1)] * 7, callbacks=[listener(log)], accumulate=3, epochs=2, optimizer=None).fit()
    text = " ".join(x for x in log if x in ("step_start", "microbatch_end", "step_end"))
    packs = re.findall(r"step_start((?: microbatch_end)+) step_end", text)
    assert [pack.count("microbatch_end") for pack in packs] == [3, 3, 1, 3, 3, 1]
    assert log.count("epoch_start") == log.count("epoch_end") == 2


def test_the_log_of_an_evaluation_and_a_save_asked_for_in_a_step(tmp_path):
    """Contract of requests: after the last on_step_end, evaluation first, then the save. B73."""
    log: list[str] = []

    class Ask(Callback):
        def on_step_start(self, event):
            event.trainer.request("save", path=str(tmp_path / "step-00000001"))
            event.trainer.request("evaluate", data=[t(3)])

        def on_step_end(self, event):
            log.append("last")

    quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[Ask(), listener(log)], log_every=1, log_delay=0).fit()
    after = log[log.index("step_end") :]
    expected = ["step_end", "last", "metrics", "evaluate_start", "evaluate_end", "metrics", "checkpoint_start", "checkpoint_saved"]
    assert after == [*expected, "epoch_end", "fit_end", "close"]


def test_the_log_of_a_resume(tmp_path):
    """A restored run hears checkpoint_loaded before fit_start, and enters the epoch in its middle."""
    data = [t(1), t(2), t(3)]
    quiet_trainer(Scalar(), MeanTask(), data, callbacks=[Checkpoint(tmp_path, every=2)], total_steps=2).fit()
    log: list[str] = []
    quiet_trainer(
        Scalar(), MeanTask(), data, callbacks=[listener(log), Checkpoint(tmp_path, every=100, asynchronous=False)], total_steps=3
    ).fit()
    start = ["checkpoint_loaded", "fit_start", "epoch_start", *STEP]
    assert log[len(BUILD) :] == [*start, "metrics", "checkpoint_start", "checkpoint_saved", "epoch_end", "fit_end", "close"]


def test_the_log_of_a_stop_and_its_reason():
    """B81: asked for inside microbatch 1 of 2, honoured after the step, with the normal end events."""
    log: list[str] = []
    reasons = []

    class Stop(Callback):
        def on_microbatch_end(self, event):
            event.trainer.stop("enough")

        def on_fit_end(self, event):
            reasons.append(event.reason)

    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 8, callbacks=[Stop(), listener(log)], accumulate=2)
    trainer.fit()
    assert trainer.step == 1 and reasons == ["enough"]
    assert log[-3:] == ["step_end", "fit_end", "close"] and log.count("microbatch_end") == 2


def test_the_log_of_an_exception():
    """B79: the others hear it once, all are closed once, the error surfaces unchanged."""
    log: list[str] = []

    class Fails(Callback):
        def on_step_end(self, event):
            raise ValueError("broken")

        def close(self):
            log.append("closed too")

    with pytest.raises(ValueError, match="^broken$") as caught:
        quiet_trainer(Scalar(), MeanTask(), [t(1)] * 3, callbacks=[Fails(), listener(log)]).fit()
    assert caught.value.__context__ is None
    assert log[-4:] == ["step_end", "exception", "closed too", "close"] and log.count("exception") == 1


def test_an_error_of_a_close_is_attached_and_does_not_replace_the_first():
    """B79."""

    class Fails(Callback):
        def on_step_end(self, event):
            raise ValueError("first")

        def close(self):
            raise OSError("second")

    with pytest.raises(ValueError, match="first") as caught:
        quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[Fails()]).fit()
    assert "OSError: second" in caught.value.__notes__[0]


def test_an_error_of_a_close_alone_surfaces():
    class Fails(Callback):
        def close(self):
            raise OSError("alone")

    with pytest.raises(OSError, match="alone"):
        quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[Fails()]).fit()


def test_step_counts_in_events():
    """`event.step` is the index of the running step; in on_step_end `trainer.step` counts it already."""
    seen = []

    class Look(Callback):
        def on_step_start(self, event):
            seen.append(("start", event.step, event.trainer.step))

        def on_optimizer_step(self, event):
            seen.append(("update", event.step, event.trainer.model.w.grad is not None))

        def on_step_end(self, event):
            seen.append(("end", event.step, event.trainer.step, event.trainer.model.w.grad))

    quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[Look()]).fit()
    assert seen == [("start", 0, 0), ("update", 0, True), ("end", 0, 1, None)]


def test_end_events_run_in_reverse_and_loggers_last():
    order = []

    def make(label: str, logger: bool):
        def note(self, event):
            order.append(label)

        methods = {"on_step_start": note, "on_step_end": note, "is_logger": logger, "state_key": label}
        return type(label, (Callback,), methods)()

    quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[make("L", True), make("a", False), make("b", False)]).fit()
    assert order == ["a", "b", "L", "b", "a", "L"]


def test_an_event_without_listener_is_not_built(monkeypatch):
    """An event nobody hears costs one truth test."""

    def refuse(self, **fields):
        raise AssertionError("built")

    monkeypatch.setattr(events.StepStart, "__init__", refuse)
    quiet_trainer(Scalar(), MeanTask(), [t(1)]).fit()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsReady(Event):
    count: int


def test_events_of_the_user_reach_their_method():
    heard = []

    class Hears(Callback):
        def on_rollouts_ready(self, event):
            heard.append(event.count)

        def on_step_end(self, event):
            event.trainer.emit(RolloutsReady(trainer=event.trainer, count=3))

    quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[Hears()]).fit()
    assert heard == [3]


def test_an_unknown_method_is_refused_with_the_nearest_name():
    class Typo(Callback):
        def on_step_ends(self, event): ...

    with pytest.raises(ConfigurationError, match="did you mean 'on_step_end'"):
        quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[Typo()])


def test_two_callbacks_with_one_state_key_are_refused():
    """B75: before step 1; with keys of their own both states come back."""

    class Counter(Callback):
        def __init__(self, key: str):
            self.key, self.count = key, 0

        @property
        def state_key(self):
            return self.key

    with pytest.raises(ConfigurationError, match="state key 'a'"):
        quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[Counter("a"), Counter("a")])


def test_a_task_that_is_a_callback_is_registered_by_itself():
    heard = []

    class Both(MeanTask, Callback):
        def on_step_end(self, event):
            heard.append(event.step)

    quiet_trainer(Scalar(), Both(), [t(1), t(1)]).fit()
    assert heard == [0, 1]


def test_calls_that_make_no_sense_inside_a_step_are_refused():
    """Evaluating inside a step is an error that names the request; outside of fit, stop() is one."""
    from trainer_kit.exceptions import StateError

    class Evaluates(Callback):
        def on_step_end(self, event):
            event.trainer.evaluate([t(1)])

    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[Evaluates()])
    with pytest.raises(StateError, match=r"trainer.request\('evaluate'"):
        trainer.fit()
    with pytest.raises(StateError, match="outside of fit"):
        trainer.stop("no")
