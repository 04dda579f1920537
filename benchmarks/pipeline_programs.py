"""Processor time to build and check a pipeline program of 64 ranks and 512 microbatches, by schedule.

    python benchmarks/pipeline_programs.py [--ranks 64] [--microbatches 512]

Prints the best of three per schedule. Exit status 1 if one takes two seconds or more.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer_kit.pipeline.building import build_program

MAX_SECONDS = 2.0
STAGES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "looped_bfs": 2, "zb1p": 2, "zbv": 2, "dualpipe_v": 2}


def seconds(schedule: str, num_ranks: int, num_microbatches: int) -> float:
    """Processor time of one build, its check included."""
    start = time.process_time()
    build_program(schedule, num_ranks, num_microbatches, stages_per_rank=STAGES[schedule])
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    options = parser.parse_args()
    slow = []
    print(f"{'schedule':<20}{'stages per rank':>16}{'seconds':>10}")
    for schedule, stages in STAGES.items():
        best = min(seconds(schedule, options.ranks, options.microbatches) for _ in range(3))
        slow += [schedule] if best >= MAX_SECONDS else []
        print(f"{schedule:<20}{stages:>16}{best:>10.2f}", flush=True)
    print(f"FAILED: {', '.join(slow)} took {MAX_SECONDS:g} seconds or more" if slow else "passed")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
