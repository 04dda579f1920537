"""Signals: sent to this process for what a run sees, and to a process of its own where the process ends."""

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from trainer_kit import events
from trainer_kit.callbacks import Signals, _grace_watch
from trainer_kit.callbacks._grace_watch import EXIT_CODE, GraceWatch
from trainer_kit.exceptions import Interrupted


@pytest.fixture
def signals(fake_trainer):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    callback, trainer = Signals(grace=60.0), fake_trainer()
    trainer.start(callback)
    yield trainer, callback
    callback.close()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_first_interrupt_ends_the_step_in_order_and_the_second_raises(signals):
    """B82, B81 and design decision 7."""
    trainer, callback = signals
    signal.raise_signal(signal.SIGINT)
    assert trainer.stops == []  # nothing happens inside the step
    trainer.finish_step(callback)
    ((reason, raising),) = trainer.stops
    assert reason == "interrupted" and type(raising) is KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    trainer.finish_step(callback)
    assert len(trainer.stops) == 1


def test_sigterm_ends_the_run_with_code_143(signals):
    trainer, callback = signals
    signal.raise_signal(signal.SIGTERM)
    trainer.finish_step(callback)
    ((reason, raising),) = trainer.stops
    assert reason == "SIGTERM" and isinstance(raising, Interrupted) and raising.code == 143


@pytest.mark.parametrize("boundary", ["evaluate", "save", "fit end"])
def test_an_interrupt_between_the_steps_is_seen_at_the_next_boundary(signals, boundary):
    """B46: a save is not broken off; it ends, then the run does."""
    trainer, callback = signals
    signal.raise_signal(signal.SIGINT)
    if boundary == "evaluate":
        callback.on_evaluate_end(events.EvaluateEnd(trainer=trainer, values={}))
    elif boundary == "save":
        callback.on_checkpoint_saved(events.CheckpointSaved(trainer=trainer, path="p", step=1))
    else:
        trainer.end(callback)
    assert len(trainer.stops) == 1


def test_an_interrupt_after_the_last_boundary_is_not_swallowed(fake_trainer):
    """B82."""
    trainer, callback = fake_trainer(), Signals()
    trainer.start(callback)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        callback.close()
    callback.close()


def test_an_interrupt_does_not_hide_the_error_that_ends_the_run(fake_trainer):
    trainer, callback = fake_trainer(), Signals()
    trainer.start(callback)
    signal.raise_signal(signal.SIGINT)
    callback.on_exception(events.RunException(trainer=trainer, exception=RuntimeError("mine")))
    callback.close()


def test_handlers_threads_and_descriptors_are_given_back(fake_trainer):
    """Contract 42, twice, since a second fit starts anew; an old interrupt does not end the second fit."""
    trainer, callback = fake_trainer(), Signals()
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    open_files, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(2):
        trainer.start(callback)
        assert signal.getsignal(signal.SIGINT) != handlers[0]
        signal.raise_signal(signal.SIGINT)
        trainer.finish_step(callback)
        callback.close()
        callback.close()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert set(os.listdir("/proc/self/fd")) == open_files and threading.active_count() == threads
    trainer.start(callback)
    trainer.stops.clear()
    trainer.finish_step(callback)
    callback.close()
    assert trainer.stops == []


def test_outside_of_the_main_thread_it_does_nothing_and_says_so(fake_trainer):
    """Contract 43's rule for odd launchers; contract 45."""
    trainer, callback, found = fake_trainer(), Signals(), []
    handler = signal.getsignal(signal.SIGTERM)

    def work():
        trainer.start(callback)
        found.extend([signal.getsignal(signal.SIGTERM), callback.describe()])
        trainer.finish_step(callback)
        callback.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] is handler and "not in the main thread" in found[1]


def test_an_ignored_interrupt_stays_ignored(fake_trainer):
    """A job started with nohup or in the background of a shell ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer, callback = fake_trainer(), Signals()
        trainer.start(callback)
        signal.raise_signal(signal.SIGINT)
        trainer.finish_step(callback)
        callback.close()
        assert trainer.stops == [] and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def exit_code_of_child(action):
    """Of a forked process that does this; 99 if it comes to its end."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_in_a_fit_leaves_an_interrupt_to_its_parent(signals, capfd):
    """Such as a data worker of a loader, to which a terminal sends Ctrl-C too, once or twice."""

    def interrupted_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    assert exit_code_of_child(interrupted_twice) == 99
    assert capfd.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_in_a_fit_ends_with_sigterm_as_without_a_fit(signals):
    assert exit_code_of_child(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM


def test_off_means_off(fake_trainer):
    handler, callback = signal.getsignal(signal.SIGINT), Signals(False)
    fake_trainer().start(callback)
    assert signal.getsignal(signal.SIGINT) is handler and "off" in callback.describe()
    callback.close()


def watched(grace):
    """A started watch whose leaving is an event, and that event."""
    left = threading.Event()
    codes = []
    watch = GraceWatch(grace, leave=lambda code: (codes.append(code), left.set()))
    return watch, left, codes


@pytest.fixture
def no_sigterm():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def test_no_boundary_within_the_grace_time_leaves(no_sigterm):
    """Design decision 7."""
    watch, left, codes = watched(0.01)
    watch.start()
    signal.raise_signal(signal.SIGTERM)
    assert left.wait(20.0)
    watch.stop()
    assert codes[0] == EXIT_CODE == 143


def test_a_second_sigterm_leaves_at_once_though_a_boundary_was_reached(no_sigterm):
    watch, left, _ = watched(1000.0)
    watch.start()
    signal.raise_signal(signal.SIGTERM)
    watch.boundary_reached()
    assert not left.wait(0.05)
    signal.raise_signal(signal.SIGTERM)
    assert left.wait(20.0)
    watch.stop()


def test_a_reached_boundary_stops_the_clock(no_sigterm):
    watch, left, _ = watched(0.05)
    watch.start()
    watch.boundary_reached()
    signal.raise_signal(signal.SIGTERM)
    assert not left.wait(0.3)
    watch.stop()


def test_the_previous_owner_of_the_wakeup_descriptor_still_gets_its_signals(no_sigterm):
    """Contract 42: an event loop of a notebook server goes on to work."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    try:
        watch, _, _ = watched(1000.0)
        watch.start()
        signal.raise_signal(signal.SIGTERM)
        assert select.select([read], [], [], 20.0)[0] and os.read(read, 8) == bytes([signal.SIGTERM])
        watch.stop()
        assert signal.set_wakeup_fd(before) == write
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


BLOCKED = """
import ctypes, importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("grace_watch", sys.argv[1])  # alone, without the seconds that torch takes
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
signal.signal(signal.SIGTERM, lambda *_: None)
watch = module.GraceWatch(float(sys.argv[2]))
watch.start()
if "fork" in sys.argv and os.fork() == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
if "fork" in sys.argv:
    os.wait()
    watch.stop()
    sys.exit(7)
print("ready", flush=True)
libc = ctypes.PyDLL(None)
while True:
    libc.usleep(1000) if "hold" not in sys.argv else ctypes.CDLL(None).pause()
"""


def run(*arguments):
    return subprocess.Popen([sys.executable, "-c", BLOCKED, _grace_watch.__file__, *arguments], stdout=subprocess.PIPE, text=True)


def test_a_process_whose_main_thread_runs_no_bytecode_still_leaves():
    """B140: blocked in a C call, where Python runs no signal handler; the process ends with 143 all the same."""
    with run("0.05", "hold") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 143


def test_the_signals_of_a_forked_child_are_not_ours():
    """Contract 43: fork-based workers that are ended with SIGTERM do not end the parent."""
    with run("0.05", "fork") as process:
        assert process.wait(timeout=20) == 7
