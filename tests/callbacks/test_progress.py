"""Progress and Summary: what is printed, where, and that the bar ends whole."""

import io
from types import SimpleNamespace

import pytest

from trainer_kit import events
from trainer_kit.callbacks import Progress, Summary


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch):
    def use(stream):
        monkeypatch.setattr("sys.stderr", stream)
        return stream

    return use


def evaluate(trainer, callback):
    callback.on_evaluate_start(events.EvaluateStart(trainer=trainer))
    callback.on_evaluate_end(events.EvaluateEnd(trainer=trainer, values={"val/loss": 0.5}))
    trainer.record(callback, trainer.step, val__loss=0.5)


def test_a_file_gets_few_lines(fake_trainer, stderr):
    """B70: not a terminal, 100 steps with 3 validations: newlines <= bars + 5, and no carriage returns."""
    stream, trainer, callback = stderr(io.StringIO()), fake_trainer(total_steps=100), Progress()
    trainer.start(callback)
    for step in range(100):
        trainer.finish_step(callback)
        trainer.record(callback, trainer.step, train__loss=0.25, optim__lr=0.001)
        if step % 40 == 0:
            evaluate(trainer, callback)
    callback.close()
    text = stream.getvalue()
    assert 1 <= text.count("\n") <= 6 and "\r" not in text
    assert "100/100" in text and "loss=0.25" in text and "lr=0.001" in text and "val=0.5" in text


def test_plain_lines_come_at_their_interval(fake_trainer, stderr, monkeypatch):
    """B70: now and then; the clock is ours here, a step a second."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("trainer_kit.callbacks.progress.time", SimpleNamespace(monotonic=lambda: clock.now))
    stream, trainer, callback = stderr(io.StringIO()), fake_trainer(total_steps=100), Progress(plain_every=30.0)
    trainer.start(callback)
    for _ in range(100):
        clock.now += 1.0
        trainer.finish_step(callback)
    callback.close()
    assert [line.split("/")[0] for line in stream.getvalue().splitlines()] == ["30", "60", "90", "100"]


def test_a_terminal_has_one_live_bar_that_ends_at_the_last_step(fake_trainer, stderr):
    """B71: 7 steps -> bar.n == 7 and closed, though no refresh was due; B70: one bar, one line."""
    stream, trainer, callback = stderr(Terminal()), fake_trainer(total_steps=7), Progress(refresh=1000.0)
    trainer.start(callback)
    for _ in range(7):
        trainer.finish_step(callback)
        evaluate(trainer, callback)
    callback.close()
    callback.close()
    assert callback.bar.n == 7 and callback.bar.disable
    assert stream.getvalue().count("\n") == 1 and "7/7" in stream.getvalue()
    assert not type(callback.bar)._instances


@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
def test_the_bar_is_closed_after_an_exception(fake_trainer, stderr, stream_type):
    """B71: an exception in step 3 leaves a closed bar at 2; contract 42: no bar is left, a second fit has a new one."""
    stderr(stream_type())
    trainer, callback = fake_trainer(total_steps=7), Progress(refresh=1000.0)
    trainer.start(callback)
    for _ in range(2):
        trainer.finish_step(callback)
    callback.close()
    first = callback.bar
    assert first.n == 2 and first.disable
    trainer.start(callback)
    for _ in range(5):
        trainer.finish_step(callback)
    callback.close()
    assert callback.bar is not first and callback.bar.n == 7 and callback.bar.initial == 2


def test_an_evaluation_shows_in_the_bar(fake_trainer, stderr):
    """B70: no second bar."""
    stream, trainer, callback = stderr(Terminal()), fake_trainer(), Progress()
    trainer.start(callback)
    callback.on_evaluate_start(events.EvaluateStart(trainer=trainer))
    assert "evaluating" in stream.getvalue() and len(type(callback.bar)._instances) == 1
    callback.on_evaluate_end(events.EvaluateEnd(trainer=trainer, values={}))
    callback.close()
    assert "evaluating" not in stream.getvalue().rsplit("\r", 1)[-1]


def test_a_run_of_unknown_length_has_a_bar(fake_trainer, stderr):
    stream, trainer, callback = stderr(Terminal()), fake_trainer(total_steps=None), Progress()
    trainer.start(callback)
    trainer.finish_step(callback)
    callback.close()
    assert callback.bar.total is None and "1 step" in stream.getvalue()


def test_the_summary_leaves_plain_lines_whole(fake_trainer, stderr, capsys):
    """B70: a print beside the bar draws no bar into a file."""
    stream, trainer = stderr(io.StringIO()), fake_trainer(total_steps=3)
    trainer.describe = lambda: SimpleNamespace(short=lambda: "model: Linear")
    summary, callback = Summary(), Progress()
    trainer.start(summary, callback)
    for _ in range(3):
        trainer.finish_step(callback)
    trainer.end(summary)
    callback.close()
    assert stream.getvalue().startswith("3/3 steps") and stream.getvalue().count("\n") == 1
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_nothing_is_shown_when_off_or_on_other_ranks(fake_trainer, stderr, capsys):
    """B70: no bar on rank 1."""
    stream = stderr(Terminal())
    trainer = fake_trainer()
    trainer.describe = lambda: pytest.fail("not asked for")
    for callback in (Progress(False), Summary(False)):
        trainer.start(callback)
        callback.close()
    trainer.context.is_main = False
    for callback in (Progress(), Summary()):
        trainer.start(callback)
        callback.close()
    assert stream.getvalue() == "" and capsys.readouterr().out == ""


def test_summary_prints_the_parts_and_one_line_at_the_end(fake_trainer, capsys):
    trainer, callback = fake_trainer(), Summary()
    trainer.describe = lambda: SimpleNamespace(short=lambda: "model: Linear")
    trainer.start(callback)
    assert capsys.readouterr().out == "model: Linear\n"
    trainer.step = 7
    trainer.history.add(7, {"train/loss": 0.125})
    trainer.end(callback, reason="interrupted")
    last = capsys.readouterr().out
    assert last.count("\n") == 1
    for word in ("step 7", "7 steps", "0.125", "interrupted"):
        assert word in last
