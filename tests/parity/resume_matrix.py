"""A run is saved on each mesh after 10 of 20 steps, and resumed on every other one.

    python tests/parity/resume_matrix.py [--meshes "one process" "tp 2"] [--optimizer muon]

The last 10 losses and the exported weights must be those of the uninterrupted run: bitwise on the same mesh, to 1e-5 relative on
another. Prints the matrix of the largest differences (rows: saved on, columns: resumed on) and a verdict; exit status 1 on a failure.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.parity.any_mesh import relative, run, weights_difference
from tests.parity.meshes import MESHES, STEPS, Spec

LIMIT = 1e-5
HALF = STEPS // 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meshes", nargs="+", choices=list(MESHES), default=list(MESHES))
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    options = parser.parse_args()
    torch.set_num_threads(1)
    good = True
    with tempfile.TemporaryDirectory() as base:
        whole = {mesh: run(Spec(mesh, optimizer=options.optimizer), f"{base}/whole/{mesh}")[0] for mesh in options.meshes}
        short = [mesh.replace("dp_", "").replace(" x ", "x").replace(" ", "") for mesh in options.meshes]
        print(f"largest relative difference from the uninterrupted run (limit {LIMIT:g}; 'same': bitwise)")
        print(f"{'saved on':<20}" + "".join(f"{name:>18}" for name in short))
        for saved in options.meshes:
            run(Spec(saved, optimizer=options.optimizer, checkpoints=f"{base}/saved/{saved}", stop_at=HALF), f"{base}/half")
            cells = []
            for mesh in options.meshes:
                cell, fine = resume(base, saved, mesh, whole[mesh], options.optimizer)
                cells.append(cell)
                good &= fine
            print(f"{saved:<20}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    print("passed: every mesh resumes what every mesh saved" if good else "FAILED")
    return 0 if good else 1


def resume(base: str, saved: str, mesh: str, whole: object, optimizer: str) -> tuple[str, bool]:
    """One cell of the matrix and whether it is as it must be."""
    checkpoints, exported = f"{base}/resumed-checkpoints", f"{base}/resumed"
    for folder in (checkpoints, exported):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(f"{base}/saved/{saved}", checkpoints)
    found = run(Spec(mesh, optimizer=optimizer, checkpoints=checkpoints), exported)[0]
    if len(found.losses) != STEPS - HALF:
        return f"{len(found.losses)} STEPS", False
    file = "final/model.safetensors"
    if found.losses == whole.losses[HALF:] and found.norms == whole.norms[HALF:] and found.files[file] == whole.files[file]:
        return "same", True
    difference = max(relative(found.losses, whole.losses[HALF:]), weights_difference(exported, f"{base}/whole/{mesh}"))
    fine = difference <= LIMIT and saved != mesh
    return f"{difference:.1e}" + ("" if fine else " FAILED"), fine


if __name__ == "__main__":
    sys.exit(main())
