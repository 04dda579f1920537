"""CPU time per optimizer step: a hand-written loop, trainer_kit, and other libraries where they are installed.

    python benchmarks/step_overhead.py [--rounds 40] [--steps 200] [--skip-large] [--no-peers]

Tiny job: in each round every contender makes `--steps` measured steps, right after or before the hand-written loop makes as many
(`time.process_time`, one torch thread, log_every 50); its overhead is the median over the rounds of the differences within such pairs.
Large job: a decoder of 10M parameters with 4 microbatches per step, by hand and with trainer_kit; the median of the ratios. Exit
status 1 if a limit is not met. What the contenders do exactly is in `contenders.py` and `peers.py`. What they print goes to a terminal
that swallows it.
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
from dataclasses import dataclass
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


@dataclass
class Pair:
    """Seconds per step of a contender, and of the hand-written loop right before or after it."""

    seconds: float
    plain: float


def measure(plain: Plain, contenders: Sequence[Any], watch: Stopwatch, rounds: int) -> dict[str, list[Pair]]:
    """The pairs of every contender by name, one per round. Who goes first alternates."""
    found: dict[str, list[Pair]] = {contender.name: [] for contender in contenders}
    for number in range(rounds + 1):
        for contender in contenders:
            if number % 2:
                base, seconds = timed_round(plain, watch), timed_round(contender, watch)
            else:
                seconds, base = timed_round(contender, watch), timed_round(plain, watch)
            if number:  # the first round warms up
                found[contender.name].append(Pair(seconds, base))
    return found


def timed_round(contender: Any, watch: Stopwatch) -> float:
    """Seconds per step of one round."""
    terminal = SwallowingTerminal()
    gc.collect()
    gc.freeze()  # what other libraries hold would make every collection slower
    watch.start_round()
    with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
        contender.run_round(watch)
    return watch.seconds_per_step()


def median_and_quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return median, low, high


def compare_tiny(rounds: int, steps: int, with_peers: bool, folder: Path) -> list[str]:
    """Print the table of the tiny job; returns what is wrong."""
    job = tiny_job(LEAD + steps + 1)
    ours = [TrainerKit(job, folder), TrainerKit(job, folder, own_data=True)]
    peers = []
    if with_peers:
        from peers import installed_peers

        peers = installed_peers(job, folder)
    found = measure(Plain(job), [*ours, *peers], Stopwatch(LEAD, steps), rounds)
    print(f"Linear(32, 64), ReLU, Linear(64, 10), batch 16; all at log_every={LOG_EVERY}")
    print(f"{rounds} rounds of {steps} steps each, CPU microseconds per step")
    print(f"{'':32}{'median':>10}{'overhead':>10}{'(quartiles)':>18}")
    print(f"{Plain.name:32}{statistics.median(pair.plain for pairs in found.values() for pair in pairs) * 1e6:10.1f}")
    overheads = {}
    for name, pairs in found.items():
        overheads[name], low, high = median_and_quartiles([(pair.seconds - pair.plain) * 1e6 for pair in pairs])
        median = statistics.median(pair.seconds for pair in pairs) * 1e6
        print(f"{name:32}{median:10.1f}{overheads[name]:10.1f}{f'({low:.1f} .. {high:.1f})':>18}")
    most = max(overheads[contender.name] for contender in ours)
    wrong = [f"trainer_kit adds {most:.1f} microseconds per step, the limit is {MAX_MICROSECONDS:.0f}"] if most > MAX_MICROSECONDS else []
    return wrong + [f"trainer_kit adds more than {peer.name}" for peer in peers if overheads[peer.name] <= most]


def compare_large(rounds: int, steps: int, config: DecoderConfig, sequences: int, length: int, folder: Path) -> list[str]:
    """Print the table of the large job; returns what is wrong."""
    job = transformer_job(2 + steps, config, sequences, length)
    pairs = measure(Plain(job), [TrainerKit(job, folder / "large")], Stopwatch(1, steps), rounds)["trainer_kit"]
    ratio, low, high = median_and_quartiles([pair.seconds / pair.plain for pair in pairs])
    print(f"Decoder, {config.num_parameters / 1e6:.1f}M parameters, 4 microbatches of {sequences} x {length} tokens; log_every={LOG_EVERY}")
    print(f"{rounds} rounds of {steps} steps each, CPU milliseconds per step")
    print(f"{Plain.name:32}{statistics.median(pair.plain for pair in pairs) * 1e3:10.2f}")
    print(f"{'trainer_kit':32}{statistics.median(pair.seconds for pair in pairs) * 1e3:10.2f}")
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
