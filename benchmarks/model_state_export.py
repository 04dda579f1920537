"""What exporting a model state costs: memory beside the model, in one process and on two ranks that hold half of each weight.

    python benchmarks/model_state_export.py [--gigabytes 1] [--folder DIR]

The model has fused projections, as that of `model_state_io.py`; the files have single ones, in four shards, so a mapper cuts them. With
bf16 the weights are cast on their way. Each case runs in processes of its own that touched all memory of the model before, and is the peak
of the resident set (VmHWM) beside what was there, of the rank that needs most. The limit is one shard file; a writer needs about one
tensor and what is on its way to it. Prints a table, and `passed` or `FAILED: ...`, as the exit status says.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from model_state_io import LAYER_BYTES, NUM_FILES, fused_mapper, in_own_process, shapes_of_model, status_mb

CASES = {"one process": (1, None), "one process, bf16": (1, "bfloat16"), "2 ranks": (2, None), "2 ranks, bf16": (2, "bfloat16")}


def export_on_rank(folder: str, num_layers: int, num_ranks: int, dtype: str | None) -> dict[str, float]:
    """Seconds, and MB of the peak above the part of the model that this rank holds."""
    from trainer_kit import MeshStrategy

    context = MeshStrategy(device="cpu", dp_shard=num_ranks).build()
    tensors = {name: part_of(shape, context, num_ranks) for name, shape in shapes_of_model(num_layers).items()}
    one_layer = {name: tensor for name, tensor in tensors.items() if name.startswith("layers.0.")}
    export(f"{folder}/first", one_layer, 1, context, dtype)  # what is imported and started counts for a run, not for an export
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what the first export freed would be used again, and not be seen
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, start = status_mb("VmRSS"), time.perf_counter()
    export(f"{folder}/all", tensors, num_layers, context, dtype)
    return {"seconds": time.perf_counter() - start, "extra_mb": status_mb("VmHWM") - before}


def part_of(shape: tuple[int, int], context: object, num_ranks: int) -> torch.Tensor:
    """A weight as this rank holds it, its memory touched."""
    if num_ranks == 1:
        return torch.zeros(shape).fill_(1)
    from torch.distributed.tensor import DTensor, Shard

    mesh = context.mesh_for("dense")["dp_cp_shard"]  # type: ignore[attr-defined]
    return DTensor.from_local(torch.zeros(shape[0] // num_ranks, shape[1]).fill_(1), mesh, [Shard(0)], run_check=False)


def export(folder: str, tensors: dict[str, torch.Tensor], num_layers: int, context: object, dtype: str | None) -> None:
    """Through the mapper, into as many files as loading has."""
    from trainer_kit.mesh.team import Team
    from trainer_kit.weights import write_model_state
    from trainer_kit.weights.export import mapped_items
    from trainer_kit.weights.sources import find_sources

    ranks = range(context.world_size)  # type: ignore[attr-defined]
    sources = find_sources(tensors, Team.of(context))  # type: ignore[arg-type]
    items = mapped_items(sources, fused_mapper(num_layers).inverse(), ranks=ranks)
    cast = None if dtype is None else getattr(torch, dtype)
    limit = shard_bytes(num_layers, dtype)
    write_model_state(folder, items, max_shard_size=limit, dtype=cast, context=context)  # type: ignore[arg-type]


def shard_bytes(num_layers: int, dtype: str | None) -> int:
    """The size of a file, so that there are as many as loading has."""
    return -(-num_layers // NUM_FILES) * LAYER_BYTES // (1 if dtype is None else 2)


def measure(case: str, folder: str, num_layers: int) -> dict[str, float]:
    """In a process of its own, with new ranks: the largest memory and time."""
    from trainer_kit.testing import run_on_ranks

    num_ranks, dtype = CASES[case]
    found = run_on_ranks(num_ranks, export_on_rank, folder, num_layers, num_ranks, dtype, timeout=600.0)
    return {name: max(of_rank[name] for of_rank in found) for name in ("seconds", "extra_mb")}


def run(folder: Path, gigabytes: float) -> int:
    """Measure all, print the table and the verdict."""
    num_layers = max(NUM_FILES, round(gigabytes * 1e9 / LAYER_BYTES))
    print(f"{num_layers * LAYER_BYTES / 1e9:.2f} GB in fp32, {num_layers} layers, {NUM_FILES} files")
    print(f"{'':<20}{'memory, MB':>11}{'limit':>8}{'seconds':>9}")
    failed = []
    for number, (case, (_, dtype)) in enumerate(CASES.items()):
        (place := folder / str(number)).mkdir()
        found, limit = in_own_process(__file__, case, place, num_layers), shard_bytes(num_layers, dtype) / 1e6
        print(f"{case:<20}{found['extra_mb']:>11.1f}{limit:>8.0f}{found['seconds']:>9.2f}")
        failed += [case] if found["extra_mb"] > limit else []
        for path in place.rglob("*.safetensors"):
            path.unlink()
    print(f"FAILED: {', '.join(failed)}" if failed else "passed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, str(options.folder), options.layers)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return run(Path(folder), options.gigabytes)


if __name__ == "__main__":
    sys.exit(main())
