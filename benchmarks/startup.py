"""What `import trainer_kit` costs on top of `import torch`, and what it must not do.

    python benchmarks/startup.py [--rounds 7]

Each round is a fresh interpreter that imports torch, then trainer_kit, and reads the clock in between; the verdict is on the median of
CPU seconds, which a busy machine changes less than the wall clock does (also printed). Neither the import nor the making of a Trainer
may load the heavy optional modules or touch a device. If the import is too slow, the most expensive modules are listed. Exit status 1
if a limit is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_SECONDS = 0.3
FORBIDDEN = ("tensorboard", "torch.utils.tensorboard", "torch.distributed.checkpoint", "torch.distributed.tensor")

TIMED = """
import json, sys, time
clocks = lambda: (time.process_time(), time.perf_counter())
start = clocks(); import torch; middle = clocks(); import trainer_kit; end = clocks()
early = [name for name in sys.argv[1:] if name in sys.modules]
data = trainer_kit.AutoDataProvider(torch.zeros(8, 2), global_batch_size=4)
trainer_kit.Trainer(torch.nn.Linear(2, 1), trainer_kit.SupervisedTask(torch.nn.functional.mse_loss), data)
print(json.dumps({
    "torch": [b - a for a, b in zip(start, middle)], "trainer_kit": [b - a for a, b in zip(middle, end)],
    "loaded": early or [name for name in sys.argv[1:] if name in sys.modules],
    "device": torch.cuda.is_initialized(), "group": torch.distributed.is_available() and torch.distributed.is_initialized(),
}))
"""


def run(arguments: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds trainer_kit in `root`, and keeps its bytecode there, as for an installed package."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment)


def import_times(statement: str, root: Path) -> dict[str, float]:
    """Module -> seconds of its own, from python's `-X importtime`."""
    found = {}
    for line in run(["-X", "importtime", "-c", statement], root).stderr.splitlines():
        parts = line.removeprefix("import time:").split("|")
        if line.startswith("import time:") and len(parts) == 3 and parts[0].strip().isdigit():
            found[parts[2].strip()] = int(parts[0]) / 1e6
    return found


def print_expensive(root: Path, count: int = 15) -> None:
    """The modules that trainer_kit adds, the most expensive first; each without what it imports."""
    torch_alone = import_times("import torch", root)
    added = {name: seconds for name, seconds in import_times("import torch, trainer_kit", root).items() if name not in torch_alone}
    print(f"{len(added)} modules more than torch; seconds of the most expensive ones, each without what it imports:")
    for name, seconds in sorted(added.items(), key=lambda item: -item[1])[:count]:
        print(f"  {seconds:7.4f}  {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--list", action="store_true", help="list the expensive modules in any case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        shutil.copytree(Path(__file__).resolve().parent.parent / "trainer_kit", root / "trainer_kit")
        rounds = [json.loads(run(["-c", TIMED, *FORBIDDEN], root).stdout) for _ in range(options.rounds + 1)][1:]  # the first compiles
        seconds = print_times(rounds)
        if seconds > MAX_SECONDS or options.list:
            print_expensive(root)
    wrong = [f"import trainer_kit costs {seconds:.3f} s over torch, the limit is {MAX_SECONDS}"] if seconds > MAX_SECONDS else []
    wrong += [f"{name} is imported" for name in rounds[0]["loaded"]]
    wrong += [what for key, what in (("device", "a device was initialised"), ("group", "a process group was started")) if rounds[0][key]]
    print("FAILED: " + "; ".join(wrong) if wrong else "passed")
    return 1 if wrong else 0


def print_times(rounds: list[dict[str, list[float]]]) -> float:
    """Print the table; returns the median CPU seconds of our import."""
    print(f"{len(rounds)} fresh interpreters, median seconds")
    print(f"{'':24}{'CPU':>8}{'wall':>8}")
    for name in ("torch", "trainer_kit"):
        cpu, wall = (statistics.median(found[name][clock] for found in rounds) for clock in (0, 1))
        print(f"{'import ' + name:24}{cpu:8.3f}{wall:8.3f}")
    return statistics.median(found["trainer_kit"][0] for found in rounds)


if __name__ == "__main__":
    sys.exit(main())
