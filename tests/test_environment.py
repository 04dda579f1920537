"""Process-wide switches of a run: on inside, and as they were afterwards; the autocast that a precision means."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.support import MeanTask, Scalar, quiet_trainer, sgd
from trainer_kit import Callback, SupervisedTask, TrainerConfig
from trainer_kit.environment import check_host_sync_support, make_autocast, run_environment
from trainer_kit.exceptions import ConfigurationError

CPU = torch.device("cpu")


@pytest.fixture
def kernels():
    """The state that a caller may have, given back after the test."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("fails", [False, True])
def test_deterministic_kernels_are_on_inside_and_as_before_outside(kernels, fails):
    """Contract 42: a caller's own choice, warn_only and cudnn's benchmark included, comes back on any exit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    try:
        with run_environment(TrainerConfig(deterministic=True), CPU):
            assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
            assert not torch.backends.cudnn.benchmark
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.benchmark


def test_without_the_setting_a_callers_choice_is_left_alone(kernels):
    torch.use_deterministic_algorithms(True)
    with run_environment(TrainerConfig(), CPU):
        assert torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_kernel_is_an_error_inside_a_fit():
    """`deterministic=True` reaches the steps: torch has no deterministic `put_` without accumulation."""

    class Puts(MeanTask):
        def compute_loss(self, pipeline_results, state):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
            return pipeline_results

    quiet_trainer(Scalar(), Puts(), [torch.ones(1)]).fit()
    with pytest.raises(RuntimeError, match=r"deterministic"):
        quiet_trainer(Scalar(), Puts(), [torch.ones(1)], deterministic=True).fit()


class FakeModule:
    """Stands for torch.cuda: keeps its mode and what was set."""

    def __init__(self):
        self.mode, self.set = 1, []

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        self.mode = mode
        self.set.append(mode)


def test_host_synchronisations_are_errors_inside(monkeypatch):
    """`detect_host_syncs` on CUDA, whose debug mode it sets and gives back."""
    fake = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    with pytest.raises(ValueError), run_environment(TrainerConfig(detect_host_syncs=True), torch.device("cuda")):
        assert fake.mode == "error"
        raise ValueError
    assert fake.set == ["error", 1]


def test_host_synchronisations_need_a_device_that_tells_them():
    check_host_sync_support(False, CPU)
    check_host_sync_support(True, torch.device("cuda"))
    with pytest.raises(ConfigurationError, match=r"CUDA.*cpu"):
        check_host_sync_support(True, CPU)


@pytest.mark.parametrize(("precision", "expected"), [("fp32", torch.float32), ("bf16", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_autocast_is_on_for_mixed_precision_alone(precision, expected):
    with (make_autocast(precision, CPU) or nullcontext)():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == expected
    assert not torch.is_autocast_enabled("cpu")


def test_mixed_precision_is_that_of_a_plain_loop_of_torch():
    """Design decision 10: fp32 parameters, gradients and updates, bf16 compute; training and evaluation alike."""
    torch.manual_seed(0)
    model, plain = nn.Linear(8, 1), nn.Linear(8, 1)
    plain.load_state_dict(model.state_dict())
    data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(3)]
    dtypes = set()

    class Look(Callback):
        def on_gradients_ready(self, event):
            dtypes.update(p.grad.dtype for p in event.trainer.model.parameters())

    trainer = quiet_trainer(
        model, SupervisedTask(nn.functional.mse_loss), data, callbacks=[Look()], optimizer=sgd(0.1), precision="bf16-mixed"
    )
    trainer.fit()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in data:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(plain(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dtypes == {torch.float32} and all(map(torch.equal, model.parameters(), plain.parameters()))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = sum(nn.functional.mse_loss(plain(x), y).item() for x, y in data) / 3
    assert trainer.evaluate(data)["val/loss"] == pytest.approx(expected, rel=1e-6)


def test_an_import_leaves_the_process_alone():
    """Contract 43: no environment variable, signal handler, thread or global mode is changed."""
    code = """
import os, signal, sys, threading, torch
before = dict(os.environ), signal.getsignal(signal.SIGTERM), threading.active_count(), torch.get_num_threads(), torch.get_default_dtype()
import trainer_kit, trainer_kit.callbacks, trainer_kit.optim
after = dict(os.environ), signal.getsignal(signal.SIGTERM), threading.active_count(), torch.get_num_threads(), torch.get_default_dtype()
assert after == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env={**os.environ, "PYTHONPATH": os.getcwd()})


def test_one_process_needs_no_process_group():
    """B136 and contract 10: no port is opened, so any number of runs fit on one machine."""
    trainer = quiet_trainer(Scalar(), MeanTask(), [torch.ones(1)])
    trainer.fit()
    assert not torch.distributed.is_initialized()
