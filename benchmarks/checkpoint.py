"""Time and memory of a training checkpoint, beside a raw write and a plain copy of the same bytes, in one run.

    python benchmarks/checkpoint.py [--params 200_000_000] [--repeats 5] [--folder /dev/shm]

The state is that of an fp32 model with the two moments of AdamW, on the CPU. Run it on a memory file system, so that it measures
the code and not a disk. Prints a table and PASS or FAIL; the exit status says the same. Its files are removed.
The ratios are medians of the ratios within a repeat, so that a busy machine slows both sides alike.
Memory is that of the process without shared and mapped files (RssAnon), sampled every millisecond.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trainer_kit.checkpoint import CheckpointSaver, flatten_state, load

LIMITS = {"save / raw write": 1.8, "second async call / copy": 1.5, "memory of a save, MB": 64, "memory of a load, MB": 64}
BLOCK_PARAMS = 12 * 1024 * 1024  # of a transformer block of width 1024: four attention matrices and an MLP of factor 4


def make_state(num_params: int) -> tuple[dict[str, torch.Tensor], object]:
    """A model of blocks with matrices and norms, and its two moments."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (max(1, num_params % BLOCK_PARAMS) // 1024 + 1, 1024)}
    for layer in range(num_params // BLOCK_PARAMS):
        shapes |= {f"blocks.{layer}.{name}": (1024, 1024) for name in ("q", "k", "v", "o")}
        shapes |= {f"blocks.{layer}.up": (4096, 1024), f"blocks.{layer}.down": (1024, 4096), f"blocks.{layer}.norm": (1024,)}
    model = {name: torch.randn(shape) for name, shape in shapes.items()}
    moments = {name: {"exp_avg": tensor * 0.1, "exp_avg_sq": tensor.square()} for name, tensor in model.items()}
    return flatten_state({"model": model, "optimizer": moments, "step": 1})


def seconds(action: Callable[[], object]) -> float:
    """Wall time of a call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report RssAnon; the benchmark needs Linux")


def added_peak(action: Callable[[], object]) -> float:
    """Megabytes by which a call raises the memory of this process at its highest point."""
    gc.collect()
    before, peak, stop = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        action()
    finally:
        stop.set()
        thread.join()
    return (max(peak, anonymous_bytes()) - before) / 2**20


def write_raw(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The bytes of the tensors into one file, nothing else."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for tensor in tensors.values():
            data = memoryview(tensor.view(-1).numpy()).cast("B")
            while data:
                data = data[os.write(handle, data) :]
    finally:
        os.close(handle)


def measure(folder: Path, num_params: int, repeats: int) -> dict[str, float]:
    """All numbers, by name. Memory is measured first, before anything left free memory behind that could be used again."""
    tensors, values = make_state(num_params)
    num_bytes = sum(tensor.numel() * 4 for tensor in tensors.values())
    print(f"{len(tensors)} tensors, {num_bytes / 1e9:.2f} GB, in {folder}, {torch.get_num_threads()} threads")
    path, saver = folder / "step-00000001", CheckpointSaver()

    def save(*, asynchronous: bool = False) -> None:
        saver.save(path, tensors, values, step=1, asynchronous=asynchronous)

    def clear() -> None:
        shutil.rmtree(path, ignore_errors=True)
        (folder / "raw").unlink(missing_ok=True)

    importlib.import_module("torch.distributed.checkpoint")  # code, not state; a run pays for it once
    targets = {name: torch.zeros_like(tensor).fill_(1) for name, tensor in tensors.items()}
    memory = {"memory of a save, MB": added_peak(save), "memory of a load, MB": added_peak(lambda: load(path, targets))}
    clear()
    times: dict[str, list[float]] = {"raw write": [], "save": [], "load": [], "copy": [], "second async call": []}
    for _ in range(repeats):
        times["raw write"].append(seconds(lambda: write_raw(folder / "raw", tensors)))
        clear()
        times["save"].append(seconds(save))
        for target in targets.values():
            target.zero_()
        times["load"].append(seconds(lambda: load(path, targets)))
        if not all(torch.equal(targets[name], tensor) for name, tensor in tensors.items()):
            raise RuntimeError("the checkpoint did not come back bitwise")
        clear()
    save(asynchronous=True)
    saver.wait()
    for _ in range(repeats):
        clear()
        times["copy"].append(seconds(lambda: [targets[name].copy_(tensor) for name, tensor in tensors.items()]))
        times["second async call"].append(seconds(lambda: save(asynchronous=True)))
        saver.wait()
    saver.close()
    for name, found in times.items():
        print(f"  {name:<18} {statistics.median(found):7.3f} s   best {min(found):7.3f} s")
    return {
        "save / raw write": statistics.median(a / b for a, b in zip(times["save"], times["raw write"], strict=True)),
        "second async call / copy": statistics.median(a / b for a, b in zip(times["second async call"], times["copy"], strict=True)),
    } | memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=200_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainer_kit-", dir=options.folder) as folder:
        results = measure(Path(folder), options.params, options.repeats)
    good = True
    for name, value in results.items():
        passed = value <= LIMITS[name]
        good &= passed
        print(f"  {name:<26} {value:7.2f}   limit {LIMITS[name]:5.1f}   {'ok' if passed else 'too much'}")
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
