"""What loading a model state costs: memory beside the model, time beside loading everything at once, and bytes read by sharded ranks.

    python benchmarks/model_state_io.py [--gigabytes 1] [--pairs 5] [--folder DIR]

The files hold the layers of a decoder in four files; the model has its query, key and value projections in one parameter, and gate and up
too. Each measurement is a process of its own, which touches all memory of the model before. Memory is the peak of the resident set
(VmHWM) beside what was there; the limit is 16 MB, as no input has to wait for another. Time is a ratio, taken in turns: to load all files
with safetensors, to concatenate, and to copy into the model. Bytes are those that four ranks of `dp_shard` read from files, over the size
of the files. What exporting costs is in `model_state_export.py`. Prints a table and `passed` or `FAILED: ...`, as the exit status says.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

NUM_FILES = 4
WIDTH, INNER = 1024, 2816
PARTS = {
    "q_proj": (WIDTH, WIDTH), "k_proj": (WIDTH // 4, WIDTH), "v_proj": (WIDTH // 4, WIDTH), "o_proj": (WIDTH, WIDTH),
    "gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER),
}  # fmt: skip
FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
LAYER_BYTES = 4 * sum(rows * columns for rows, columns in PARTS.values())
MAX_EXTRA_MB, MAX_TIME_RATIO, MAX_BYTES_RATIO = 16.0, 1.0, 1.1


def write_files(folder: Path, gigabytes: float) -> int:
    """The files as other tools write them; returns the number of layers."""
    from safetensors.torch import save_file

    num_layers = max(NUM_FILES, round(gigabytes * 1e9 / LAYER_BYTES))
    weight_map = {}
    for file in range(NUM_FILES):
        name = f"model-{file + 1:05d}-of-{NUM_FILES:05d}.safetensors"
        layers = range(file * num_layers // NUM_FILES, (file + 1) * num_layers // NUM_FILES)
        tensors = {f"layers.{layer}.{part}.weight": torch.randn(shape) for layer in layers for part, shape in PARTS.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return num_layers


def fused_mapper(num_layers: int) -> Any:
    """From the projections of the files to the fused parameters of the model."""
    from trainer_kit.weights import Concatenate, Parallel, Rename, for_each

    fused = [
        Concatenate([f"layers.{{i}}.{part}.weight" for part in parts], f"layers.{{i}}.{name}", sizes=[PARTS[part][0] for part in parts])
        for name, parts in FUSED.items()
    ]
    same = [Rename(f"layers.{{i}}.{part}.weight", f"layers.{{i}}.{part}") for part in ("o_proj", "down_proj")]
    return for_each({"i": range(num_layers)}, Parallel([*fused, *same]))


def shapes_of_model(num_layers: int) -> dict[str, tuple[int, int]]:
    """Name -> shape of each parameter."""
    of_layer = {name: (sum(PARTS[part][0] for part in parts), WIDTH) for name, parts in FUSED.items()}
    of_layer |= {part: PARTS[part] for part in ("o_proj", "down_proj")}
    return {f"layers.{layer}.{name}": shape for layer in range(num_layers) for name, shape in of_layer.items()}


def load_streamed(folder: str, targets: dict[str, torch.Tensor], num_layers: int) -> None:
    """As the trainer does it."""
    from trainer_kit.weights import load_model_state

    load_model_state(folder, fused_mapper(num_layers), targets)


def load_at_once(folder: str, targets: dict[str, torch.Tensor], num_layers: int) -> None:
    """All files, then the groups, then the copies."""
    from safetensors.torch import load_file

    stored: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        stored |= load_file(file)
    for layer in range(num_layers):
        for name, parts in FUSED.items():
            targets[f"layers.{layer}.{name}"].copy_(torch.cat([stored[f"layers.{layer}.{part}.weight"] for part in parts]))
        for part in ("o_proj", "down_proj"):
            targets[f"layers.{layer}.{part}"].copy_(stored[f"layers.{layer}.{part}.weight"])


LOADS = {"streamed": load_streamed, "at once": load_at_once}


def status_mb(field: str) -> float:
    """A memory figure of this process in MB (10**6 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"this kernel does not report {field}; the benchmark needs Linux")


def measure_load(kind: str, folder: str, num_layers: int) -> dict[str, float]:
    """In a process of its own: seconds, and MB of the peak above the model itself."""
    targets = {name: torch.zeros(shape).fill_(1) for name, shape in shapes_of_model(num_layers).items()}
    from safetensors.torch import load_file  # noqa: F401  (what is imported before the load counts on neither side)

    fused_mapper(1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, start = status_mb("VmRSS"), time.perf_counter()
    LOADS[kind](folder, targets, num_layers)
    return {"seconds": time.perf_counter() - start, "extra_mb": status_mb("VmHWM") - before}


def bytes_read_on_rank(folder: str, num_layers: int) -> int:
    """On one of four ranks: what it reads from files to fill its shards."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from trainer_kit import MeshStrategy
    from trainer_kit.weights import load_model_state

    mesh = MeshStrategy(device="cpu", dp_shard=4).build().mesh_for("dense")["dp_cp_shard"]
    shapes = shapes_of_model(num_layers)
    targets = {name: distribute_tensor(torch.zeros(shape), mesh, [Shard(0)], src_data_rank=None) for name, shape in shapes.items()}
    mapper = fused_mapper(num_layers)
    before = characters_read()
    load_model_state(folder, mapper, targets)
    return characters_read() - before


def characters_read() -> int:
    """Bytes that this process has read so far by system calls."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def in_own_process(script: str, case: str, folder: Path, num_layers: int) -> dict[str, float]:
    """What one case of a script prints, which also takes the hidden options of this one."""
    command = [sys.executable, script, "--measure", case, "--folder", str(folder), "--layers", str(num_layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the case {case!r} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(folder: Path, gigabytes: float, pairs: int) -> int:
    """Measure all, print the table and the verdict."""
    from trainer_kit.testing import run_on_ranks

    num_layers = write_files(folder, gigabytes)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    ratios, extras, at_once = [], [], []
    for _ in range(pairs):
        ours, theirs = (in_own_process(__file__, kind, folder, num_layers) for kind in LOADS)
        ratios.append(ours["seconds"] / theirs["seconds"])
        extras.append(ours["extra_mb"])
        at_once.append(theirs["extra_mb"])
    read = sum(run_on_ranks(4, bytes_read_on_rank, str(folder), num_layers))
    rows = [
        ("memory beside the model, MB", max(extras), MAX_EXTRA_MB),
        ("time / loading all at once", statistics.median(ratios), MAX_TIME_RATIO),
        ("bytes read by dp_shard 4 / file size", read / size, MAX_BYTES_RATIO),
    ]
    print(f"{size / 1e9:.2f} GB in {NUM_FILES} files, {num_layers} layers; all at once takes {max(at_once):.0f} MB beside the model")
    print(f"{'':<38}{'found':>9}{'limit':>8}")
    for name, found, limit in rows:
        print(f"{name:<38}{found:>9.3f}{limit:>8g}")
    failed = [name for name, found, limit in rows if found > limit]
    print(f"FAILED: {', '.join(failed)}" if failed else "passed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--measure", choices=LOADS, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_load(options.measure, str(options.folder), options.layers)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return run(Path(folder), options.gigabytes, options.pairs)


if __name__ == "__main__":
    sys.exit(main())
