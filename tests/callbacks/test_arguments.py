"""Wrong arguments are refused in the constructor, with the class, the argument, and what was expected."""

import math

import pytest

from trainer_kit import callbacks as c
from trainer_kit.exceptions import ConfigurationError

WRONG = [
    (lambda: c.Checkpoint("x", every=0), ["Checkpoint", "every=0", "at least 1"]),
    (lambda: c.Checkpoint("x", every=2.5), ["every=2.5", "whole number"]),
    (lambda: c.Checkpoint("x", every=True), ["every=True"]),
    (lambda: c.Checkpoint("x", every=1, keep_last=0), ["keep_last=0"]),
    (lambda: c.Checkpoint("x", every=1, keep_every=-3), ["keep_every=-3"]),
    (lambda: c.Checkpoint("x", every=1, best="val/loss"), ["best='val/loss'", "'min'"]),
    (lambda: c.Checkpoint("x", every=1, best=("val/loss", "mim", 1)), ["best[1]", "'mim'", "did you mean 'min'"]),
    (lambda: c.Checkpoint("x", every=1, best=("val/loss", "min", 0)), ["best[2]"]),
    (lambda: c.Checkpoint("nosuchscheme://x", every=1), ["nosuchscheme"]),
    (lambda: c.Checkpoint("", every=1), ["empty"]),
    (lambda: c.GradientClipping(), ["exactly one", "max_norm="]),
    (lambda: c.GradientClipping(1.0, max_value=1.0), ["exactly one"]),
    (lambda: c.GradientClipping(0.0), ["max_norm=0.0"]),
    (lambda: c.GradientClipping(math.nan), ["max_norm=nan"]),
    (lambda: c.GradientClipping(max_value=-1), ["max_value=-1"]),
    (lambda: c.GradientClipping(1.0, norm_type=0), ["norm_type=0"]),
    (lambda: c.GradientClipping(math.inf, log=False), ["no effect"]),
    (lambda: c.TensorBoard(None), ["folder=None"]),
    (lambda: c.TensorBoard("nosuchscheme://x"), ["nosuchscheme"]),
    (lambda: c.JSONLines("s3://bucket/x.jsonl"), ["s3://", "local path"]),
    (lambda: c.JSONLines(""), ["path=''"]),
    (lambda: c.CSV("gs://x/y.csv"), ["gs://", "local path"]),
    (lambda: c.Progress(refresh=0.0), ["refresh=0.0"]),
    (lambda: c.Progress(plain_every=-1), ["plain_every=-1"]),
    (lambda: c.Evaluate(None), ["data=None"]),
    (lambda: c.Evaluate([1], every=0), ["every=0"]),
    (lambda: c.Evaluate([1], name=""), ["name=''"]),
    (lambda: c.Evaluate([1], at_end=False), ["never evaluates"]),
    (lambda: c.EarlyStopping(patience=0), ["patience=0"]),
    (lambda: c.EarlyStopping(mode="lower"), ["mode='lower'", "'min' or 'max'"]),
    (lambda: c.EarlyStopping(""), ["metric=''"]),
    (lambda: c.EarlyStopping(min_delta=-0.1), ["min_delta=-0.1"]),
    (lambda: c.EMA(1.0), ["decay=1.0", "below 1"]),
    (lambda: c.EMA(-0.1), ["decay=-0.1"]),
    (lambda: c.EMA(every=0), ["every=0"]),
    (lambda: c.Throughput(tokens=3), ["tokens=3"]),
    (lambda: c.Throughput(flops_per_token=1.0), ["needs tokens="]),
    (lambda: c.Throughput(flops_per_token=1.0, flops_per_sample=1.0, tokens=len), ["one of"]),
    (lambda: c.Throughput(peak_flops=1e12), ["no effect"]),
    (lambda: c.Throughput(flops_per_sample=0), ["flops_per_sample=0"]),
    (lambda: c.GarbageCollection(0), ["every=0"]),
    (lambda: c.Profiler("x", active=0), ["active=0"]),
    (lambda: c.Profiler("x", warmup=0), ["warmup=0"]),
    (lambda: c.Profiler("x", wait=-1), ["wait=-1"]),
    (lambda: c.Profiler("memory://x"), ["memory://"]),
    (lambda: c.Signals(grace=0), ["grace=0"]),
    (lambda: c.SpikeGuard(window=3), ["window=3", "at least 10"]),
    (lambda: c.SpikeGuard(threshold=0), ["threshold=0"]),
    (lambda: c.SpikeGuard(threshold=math.inf), ["threshold=inf"]),
    (lambda: c.SpikeGuard(patience=0), ["patience=0"]),
    (lambda: c.SpikeGuard(action="raise"), ["action='raise'", "'warn' or 'stop'"]),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_arguments_are_refused_with_the_words_that_help(number):
    """Contract 45: nothing is ignored silently; B39: a URL that cannot work is refused before training."""
    make, words = WRONG[number]
    with pytest.raises(ConfigurationError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_two_of_a_class_with_different_settings_have_different_state_keys():
    """B75."""
    pairs = [
        (c.Checkpoint("a", every=1), c.Checkpoint("b", every=1, name="Second")),
        (c.GradientClipping(1.0), c.GradientClipping(max_value=1.0)),
        (c.Evaluate([1]), c.Evaluate([1], name="test")),
        (c.EarlyStopping("val/loss"), c.EarlyStopping("val/accuracy")),
        (c.SpikeGuard("train/loss"), c.SpikeGuard("optim/grad_norm")),
        (c.JSONLines("a"), c.JSONLines("b", name="Second")),
        (c.CSV("a"), c.CSV("b", name="Second")),
        (c.TensorBoard("a"), c.TensorBoard("b", name="Second")),
    ]
    for first, second in pairs:
        assert first.state_key != second.state_key
