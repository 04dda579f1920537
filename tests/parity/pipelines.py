"""One decoder on every pipeline: the run must be that of one process.

    python tests/parity/pipelines.py [--only zbv]

For every mesh, schedule and number of stages per rank it prints the largest relative differences from one process, in fp32, by norm of
each parameter: of gradients, with 1 to 9 microbatches (limit 1e-6); of losses, gradient norms and final weights of ten steps (limit 1e-5);
and whether the initial weights are bitwise equal. The models: one with the head tied to the embedding and single frozen weights, and one
whose first stage is frozen, with a tied head where there are two stages per rank; on meshes with other dimensions they take turns. Then a
matrix of runs that were saved after five steps on one layout and go on on another one. Exit status 1 if a limit is not met. What the
ranks do is in `pipeline_runs.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.parity.pipeline_runs import MESHES, NUMBERS, Case, Differences, Layout, Variant, compare_all, refer, resume_all, save_halves
from trainer_kit.exceptions import StateError
from trainer_kit.model import distribute_layers
from trainer_kit.pipeline.schedules import SCHEDULES
from trainer_kit.testing import run_on_ranks

GRADIENT_LIMIT, LIMIT = 1e-6, 1e-5
TIMEOUT = 900.0
RESUMES = [
    Layout(),
    Layout("pp 2", "1f1b", 1),
    Layout("pp 2", "interleaved_1f1b", 2),
    Layout("pp 2", "zbv", 2),
    Layout("pp 4", "1f1b", 1),
    Layout("pp 2 x dp_shard 2", "zb1p", 1),
    Layout("pp 2 x tp 2", "looped_bfs", 2),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    trains = [schedule.name for schedule in SCHEDULES.values() if schedule.trains]
    parser.add_argument("--only", choices=[*MESHES, *trains, "resume"])
    only = parser.parse_args().only
    torch.set_num_threads(1)
    start, good = time.monotonic(), True
    if only != "resume":
        meshes = [only] if only in MESHES else list(MESHES)
        good &= print_differences(meshes, [only] if only in trains else trains)
    if only in (None, "resume"):
        good &= print_resumes()
    print(f"\n{'passed: every pipeline gives the run of one process' if good else 'FAILED'} ({time.monotonic() - start:.0f} s)")
    return 0 if good else 1


def print_differences(meshes: Sequence[str], schedules: Sequence[str]) -> bool:
    """The table of meshes and schedules; whether every line is within the limits."""
    good = True
    print(f"largest relative difference from one process, fp32 (limits: gradients {GRADIENT_LIMIT:g}, others {LIMIT:g})")
    print(f"{'mesh':<19}{'schedule':<18}{'stages':<8}{'gradients':>10}{'losses':>9}{'norms':>9}{'weights':>9}  initial")
    with tempfile.TemporaryDirectory() as folder:
        for mesh in meshes:
            layouts = [layout for schedule in schedules for layout in layouts_of(mesh, schedule)]
            cases = {layout: cases_of(layout, number) for number, layout in enumerate(layouts)}
            ensure_references([case for some in cases.values() for case in some], folder)
            for layout, some in cases.items():
                print(f"{mesh:<19}{layout.schedule:<18}{layout.stages_per_rank:<8}", end="", flush=True)
                cells, complaints = line(some, folder)
                print(f"{cells}{'   FAILED' * bool(complaints)}", *complaints, sep="\n    ", flush=True)
                good &= not complaints
    return good


def layouts_of(mesh: str, schedule: str) -> list[Layout]:
    """With all numbers of stages per rank, to 3."""
    fixed = SCHEDULES[schedule].stages_per_rank
    return [Layout(mesh, schedule, number, "pack" if number == 2 else "microbatch") for number in ([fixed] if fixed else [1, 2, 3])]


def cases_of(layout: Layout, number: int) -> list[Case]:
    """The runs of a line; where ranks have more to do than stages, one of the two models, by the number of the line."""
    layers = layout.num_layers
    first_stage = len(distribute_layers(layers, layout.num_stages)[0])
    variants = [Variant(layers, is_tied=True), Variant(layers, is_tied=layout.stages_per_rank == 2, frozen_layers=first_stage)]
    if layout.mesh is not None and len(MESHES[layout.mesh]) > 1:
        variants = [variants[number % 2]]
    return [Case(layout, variant, run) for variant in variants for run in ("gradients", "training")]


def line(cases: Sequence[Case], folder: str) -> tuple[str, list[str]]:
    """The cells of a layout, and what is wrong with it."""
    try:
        found = [difference for case in measure(cases, folder) for difference in case]
    except StateError as error:
        return "ERROR", str(error).splitlines()
    gradients, losses, norms, weights = (max(getattr(each, name) for each in found) for name in ("gradients", "losses", "norms", "weights"))
    initial = all(each.initial_is_equal for each in found)
    cells = f"{gradients:>10.1e}{losses:>9.1e}{norms:>9.1e}{weights:>9.1e}  {'equal' if initial else 'DIFFER'}"
    if gradients <= GRADIENT_LIMIT and max(losses, norms, weights) <= LIMIT and initial:
        return cells, []
    return cells, ["the worst gradients or weights: {1}: {0:.1e}".format(*max(each.worst for each in found))]


def measure(cases: Sequence[Case], folder: str, numbers: Sequence[int] | None = None) -> list[list[Differences]]:
    """The differences of each case by rank, of cases of one layout. numbers: of microbatches, instead of all that are possible."""
    ensure_references(cases, folder, numbers or NUMBERS)
    found = run_on_ranks(cases[0].layout.num_ranks, compare_all, cases, folder, numbers, timeout=TIMEOUT)
    by_case = [list(by_rank) for by_rank in zip(*found, strict=True)]
    for case, by_rank in zip(cases, by_case, strict=True):
        check_ranks(case, by_rank)
    return by_case


def ensure_references(cases: Sequence[Case], folder: str, numbers: Sequence[int] = NUMBERS) -> None:
    """The runs of one process that these cases are compared with, as files in the folder."""
    if missing := list({case.reference: case for case in cases if not Path(folder, case.reference).exists()}.values()):
        run_on_ranks(1, refer, missing, folder, numbers, timeout=TIMEOUT)


def check_ranks(case: Case, by_rank: Sequence[Differences]) -> None:
    """Raise StateError if they did not log the same, or nobody has a parameter."""
    if missing := set.intersection(*(each.missing for each in by_rank)):
        raise StateError(f"{case}: no rank has {sorted(missing)}")
    if any(each.logged != by_rank[0].logged for each in by_rank):
        raise StateError(f"{case}: the ranks have different losses or norms")


def print_resumes(layouts: Sequence[Layout] = RESUMES) -> bool:
    """The matrix of runs that go on on another layout; whether every cell is as it must be."""
    with tempfile.TemporaryDirectory() as folder:
        matrix = resumed(layouts, folder)
    print(f"\nten steps, saved after five: largest relative difference from the whole run (limit {LIMIT:g}; 'same': bitwise)")
    print("saved on, resumed on".ljust(32) + "".join(f"{f'({number})':>9}" for number in range(len(layouts))))
    good = True
    for number, saved in enumerate(layouts):
        cells = [cell(row[number], must_be_same=other == number) for other, row in enumerate(matrix)]
        good &= all(fine for _, fine in cells)
        print(f"{f'({number}) {saved}':<32}" + "".join(f"{text:>9}" for text, _ in cells))
    return good


def resumed(layouts: Sequence[Layout], folder: str) -> list[list[list[Differences]]]:
    """By layout that goes on, by layout that saved, by rank."""
    variant = Variant(max(layout.num_layers for layout in layouts), is_tied=True)
    by_number = {number: [layout for layout in layouts if layout.num_ranks == number] for number in {each.num_ranks for each in layouts}}
    found: dict[Layout, list[list[Differences]]] = {}
    for number, some in by_number.items():
        run_on_ranks(number, save_halves, some, variant, folder, timeout=TIMEOUT)
    for number, some in by_number.items():
        by_rank = run_on_ranks(number, resume_all, some, layouts, variant, folder, timeout=TIMEOUT)
        for index, layout in enumerate(some):
            found[layout] = [list(each) for each in zip(*(of_rank[index] for of_rank in by_rank), strict=True)]
    return [found[layout] for layout in layouts]


def cell(by_rank: Sequence[Differences], *, must_be_same: bool) -> tuple[str, bool]:
    """The text of a cell of the matrix and whether it is as it must be."""
    largest = max(max(each.losses, each.norms, each.weights) for each in by_rank)
    fine = largest <= (0 if must_be_same else LIMIT)
    return ("same" if largest == 0 else f"{largest:.1e}") + ("" if fine else "!"), fine


if __name__ == "__main__":
    sys.exit(main())
