"""Experts that are shared out, and sequences that are cut: the run on every mesh must be that of one process.

    python tests/parity/experts_and_context.py [--only experts|context]

It prints the largest relative differences of losses, gradient norms, all gradients and final weights of ten steps from one process that
runs the same microbatches (limits: 1e-9 in fp64, 1e-5 in fp32), the matrix of runs that go on on another mesh, and what memory holds.
Exit status 1 if a limit is not met. What is run is in `expert_runs.py` and `context_runs.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.parity import context_runs, expert_runs

PARTS: dict[str, Callable[[], bool]] = {
    "experts": expert_runs.print_all,
    "context": context_runs.print_all,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS)
    only = parser.parse_args().only
    torch.set_num_threads(1)
    start = time.monotonic()
    results = [run() for name, run in PARTS.items() if only in (None, name)]
    print(f"\n{'passed: every mesh gives the run of one process' if all(results) else 'FAILED'} ({time.monotonic() - start:.0f} s)")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
