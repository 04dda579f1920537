"""CPU time per optimizer step: a hand-written loop, trainer_kit, and other libraries where they are installed.

    python benchmarks/step_overhead.py [--rounds 40] [--steps 200] [--skip-large] [--no-peers]

Tiny job: in each round every contender makes `--steps` measured steps in turn (`time.process_time`, one torch thread, log_every 50);
its overhead is the median over the rounds of its time less that of the hand-written loop in the same round. Large job: a decoder of
10M parameters with 4 microbatches per step, by hand and with trainer_kit in turn; the median of the ratios. Exit status 1 if a limit
is not met. What the contenders do exactly is in `contenders.py` and `peers.py`; their output goes to a terminal that swallows it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from contenders import LOG_EVERY, Plain, Stopwatch, TrainerKit, tiny_job, transformer_job

from trainer_kit.models import DecoderConfig

MAX_MICROSECONDS = 40.0
MAX_RATIO = 1.01
LEAD = 20  # steps of a round before the measured ones


class SwallowingTerminal(io.StringIO):
    """Looks like a terminal, so that live bars are live, and keeps nothing."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


def measure(contenders: Sequence[Any], watch: Stopwatch, rounds: int) -> dict[str, list[float]]:
    """Seconds per step by name, one value per round. The order turns round, so that none always follows the same one."""
    found: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    terminal = SwallowingTerminal()
    for number in range(rounds + 1):
        for contender in contenders if number % 2 else reversed(contenders):
            gc.collect()
            gc.freeze()  # what other libraries hold would make every collection slower
            watch.start_round()
            with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
                contender.run_round(watch)
            if number:  # the first round warms up
                found[contender.name].append(watch.seconds_per_step())
    return found


def compare_tiny(rounds: int, steps: int, with_peers: bool, folder: Path) -> list[str]:
    """Print the table of the tiny job; returns what is wrong."""
    job = tiny_job(LEAD + steps + 1)
    contenders = [Plain(job), TrainerKit(job, folder), TrainerKit(job, folder, own_data=True)]
    num_ours = len(contenders)
    if with_peers:
        from peers import installed_peers

        contenders += installed_peers(job, folder)
    found = measure(contenders, Stopwatch(LEAD, steps), rounds)
    plain = found[Plain.name]
    print(f"Linear(32, 64), ReLU, Linear(64, 10), batch 16; all at log_every={LOG_EVERY}")
    print(f"{rounds} rounds of {steps} steps each, CPU microseconds per step")
    print(f"{'':32}{'median':>10}{'overhead':>10}{'(quartiles)':>18}")
    overheads = {}
    for name, seconds in found.items():
        differences = [(mine - base) * 1e6 for mine, base in zip(seconds, plain, strict=True)]
        overheads[name] = statistics.median(differences)
        low, _, high = statistics.quantiles(differences, n=4) if rounds > 1 else (differences[0],) * 3
        shown = "" if name == Plain.name else f"{overheads[name]:10.1f}{f'({low:.1f} .. {high:.1f})':>18}"
        print(f"{name:32}{statistics.median(seconds) * 1e6:10.1f}{shown}")
    names = [contender.name for contender in contenders]
    ours = max(overheads[name] for name in names[1:num_ours])
    wrong = [f"trainer_kit adds {ours:.1f} microseconds per step, the limit is {MAX_MICROSECONDS:.0f}"] if ours > MAX_MICROSECONDS else []
    return wrong + [f"trainer_kit adds more than {name}" for name in names[num_ours:] if overheads[name] <= ours]


def compare_large(rounds: int, steps: int, config: DecoderConfig, sequences: int, length: int, folder: Path) -> list[str]:
    """Print the line of the large job; returns what is wrong."""
    job = transformer_job(2 + steps, config, sequences, length)
    found = measure([Plain(job), TrainerKit(job, folder / "large")], Stopwatch(1, steps), rounds)
    ratios = [mine / base for mine, base in zip(found["trainer_kit"], found[Plain.name], strict=True)]
    ratio = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4) if rounds > 1 else (ratio,) * 3
    print(f"Decoder, {config.num_parameters / 1e6:.1f}M parameters, 4 microbatches of {sequences} x {length} tokens; log_every={LOG_EVERY}")
    print(f"{rounds} rounds of {steps} steps each, CPU milliseconds per step")
    for name, seconds in found.items():
        print(f"{name:32}{statistics.median(seconds) * 1e3:10.2f}")
    print(f"{'ratio':32}{ratio:10.4f}{'':10}{f'({low:.4f} .. {high:.4f})':>18}")
    return [f"trainer_kit takes {ratio:.4f} of the hand-written loop, the limit is {MAX_RATIO}"] if ratio > MAX_RATIO else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=200, help="measured steps of a round")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="compare with installed libraries")
    parser.add_argument("--skip-large", action="store_true")
    parser.add_argument("--large-rounds", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="a tiny transformer in place of the large one: shows that it works")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        wrong = compare_tiny(options.rounds, options.steps, options.peers, Path(name))
        if options.smoke:
            config = DecoderConfig(vocab_size=32, num_layers=1, num_heads=2, hidden_size=32, max_seq_len=16)
            wrong += compare_large(options.large_rounds, 1, config, 2, 16, Path(name))
        elif not options.skip_large:
            wrong += compare_large(options.large_rounds, 2, DecoderConfig.small(), 8, 64, Path(name))
    load, num_cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load > num_cpus:
        print(f"The load average is {load:.1f} on {num_cpus} CPUs: other processes inflate all times above")
    print("FAILED: " + "; ".join(wrong) if wrong else "passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
