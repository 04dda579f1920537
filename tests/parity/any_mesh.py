"""One small transformer on every mesh: the run must be that of one process.

    python tests/parity/any_mesh.py [--only "tp 2"] [--steps 20]

For AdamW and Muon, in fp32 and fp64, it prints per mesh the largest relative difference of losses, gradient norms and final weights
from one process, and whether the initial weights and the order of samples are equal; then one run with dropout per mesh with tensor
parallelism, in which tensor peers must hold bitwise the same. Exit status 1 if a limit is not met: 1e-5 in fp32, 1e-9 in fp64.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import load_file

from tests.parity.meshes import MESHES, STEPS, Outcome, Spec, num_ranks, train
from trainer_kit.testing import run_on_ranks

LIMITS = {False: 1e-5, True: 1e-9}


def run(spec: Spec, folder: str) -> list[Outcome]:
    """The outcomes of a run by rank."""
    return run_on_ranks(num_ranks(spec.mesh), train, spec, folder, timeout=900.0)


def relative(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two lists of numbers."""
    assert len(found) == len(expected)
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found, expected, strict=True))


def weights_difference(folder: str, reference: str) -> float:
    """The largest difference of a tensor from its reference, by norm."""
    found, expected = (load_file(f"{path}/final/model.safetensors") for path in (folder, reference))
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).double().norm() / expected[name].double().norm()) for name in expected)


def order(outcomes: list[Outcome]) -> list[list[int]]:
    """The samples of each step over all data ranks; an error if tensor peers saw different ones."""
    by_rank: dict[int, list[list[int]]] = {}
    for outcome in outcomes:
        assert by_rank.setdefault(outcome.data_rank, outcome.ids) == outcome.ids, "tensor peers saw different samples"
    steps = zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)
    return [[number for part in parts for number in part] for parts in steps]


def peers_are_equal(outcomes: list[Outcome]) -> bool:
    """Whether tensor peers hold the same replicas."""
    return all(a.replicas == b.replicas for a in outcomes for b in outcomes if a.data_rank == b.data_rank)


def compare(meshes: list[str], double: bool, optimizer: str, steps: int) -> bool:
    """One table; whether every line is within the limit."""
    limit, good = LIMITS[double], True
    print(f"\n{optimizer}, {'fp64' if double else 'fp32'}, {steps} steps: largest relative difference from one process (limit {limit:g})")
    print(f"{'mesh':<20}{'loss':>10}{'grad norm':>11}{'weights':>10}  initial  order")
    with tempfile.TemporaryDirectory() as base:
        reference = run(Spec("one process", double, optimizer, steps=steps), f"{base}/one")
        for mesh in meshes:
            folder = f"{base}/mesh"
            outcomes = run(Spec(mesh, double, optimizer, steps=steps), folder)
            first = outcomes[0]
            numbers = [relative(first.losses, reference[0].losses), relative(first.norms, reference[0].norms)]
            numbers.append(weights_difference(folder, f"{base}/one"))
            initial = first.files["initial/model.safetensors"] == reference[0].files["initial/model.safetensors"]
            ordered = order(outcomes) == order(reference)
            agree = all(outcome.losses == first.losses and outcome.norms == first.norms for outcome in outcomes)
            fine = max(numbers) <= limit and initial and ordered and agree and peers_are_equal(outcomes)
            good &= fine
            print(
                f"{mesh:<20}{numbers[0]:>10.1e}{numbers[1]:>11.1e}{numbers[2]:>10.1e}  {'equal' if initial else 'DIFFER':<8} "
                f"{'equal' if ordered else 'DIFFERS'}{'' if fine else '   FAILED'}",
                flush=True,
            )
    return good


def with_dropout(meshes: list[str], steps: int) -> bool:
    """Runs with dropout on meshes with tensor parallelism: peers stay bitwise equal."""
    good = True
    print(f"\nadamw, fp32, dropout 0.2, {steps} steps")
    print(f"{'mesh':<20}  peers")
    for mesh in meshes:
        with tempfile.TemporaryDirectory() as folder:
            equal = peers_are_equal(run(Spec(mesh, dropout=0.2, steps=steps), folder))
        good &= equal
        print(f"{mesh:<20}  {'bitwise equal' if equal else 'DIFFER   FAILED'}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[mesh for mesh in MESHES if mesh != "one process"])
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    meshes = [options.only] if options.only else [mesh for mesh in MESHES if mesh != "one process"]
    results = [compare(meshes, double, optimizer, options.steps) for optimizer in ("adamw", "muon") for double in (False, True)]
    if tensor_meshes := [mesh for mesh in meshes if "tp" in MESHES[mesh]]:
        results.append(with_dropout(tensor_meshes, options.steps))
    print("\npassed: every mesh gives the run of one process" if all(results) else "\nFAILED")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
