"""Whether a run that was killed and restarted ended as the one that was not: weights, checkpoints, log and samples, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from job import KEEP_LAST, NUM_STEPS
from safetensors.torch import load_file

from trainer_kit.checkpoint import read_manifest

MANIFEST = "manifest.json"  # a checkpoint without it is not valid


def differences(folder: Path, reference: Path) -> list[str]:
    """What is not the same, in words; empty if everything is."""
    found = _tensor_differences("exported weights", folder / "model", reference / "model")
    last = f"checkpoints/step-{NUM_STEPS:08d}"
    found += _tensor_differences("last checkpoint", folder / last, reference / last)
    values, expected = _values(folder / last), _values(reference / last)
    found += [f"last checkpoint: {key} is {values.get(key)!r:.200}, expected {expected.get(key)!r:.200}"
              for key in sorted(values.keys() | expected.keys()) if values.get(key) != expected.get(key)]  # fmt: skip
    found += _log_differences((folder / "log.jsonl").read_text(), (reference / "log.jsonl").read_text())
    found += _sample_differences(folder / "samples.txt", reference / "samples.txt")
    valid = [path.parent.name for path in sorted(folder.glob(f"checkpoints/*/{MANIFEST}"))]
    expected_valid = [path.parent.name for path in sorted(reference.glob(f"checkpoints/*/{MANIFEST}"))]
    # One more may be left by a death between the last save and the removal that follows it: the finished run does not start again.
    if valid[-KEEP_LAST:] != expected_valid or len(valid) > KEEP_LAST + 1:
        found.append(f"the valid checkpoints are {valid}, expected {expected_valid}")
    return found


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def _tensor_differences(what: str, folder: Path, reference: Path) -> list[str]:
    ours, theirs = _tensors(folder), _tensors(reference)
    if not theirs or ours.keys() != theirs.keys():
        return [f"{what}: tensors on one side only: {sorted(ours.keys() ^ theirs.keys())}, {len(theirs)} expected"]
    return [f"{what}: {name} differs" for name in ours if not _same_bits(ours[name], theirs[name])]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    return same_kind and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _values(checkpoint: Path) -> dict[str, Any]:
    """The plain values of a checkpoint, by path: random streams, data position, schedule, callbacks."""
    return dict(_flat("", read_manifest(str(checkpoint)).values))


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [item for key, inner in value.items() for item in _flat(f"{prefix}/{key}", inner)]
    return [(prefix, value)]


def _log_differences(text: str, expected: str) -> list[str]:
    if text == expected and expected.count("\n") == NUM_STEPS:
        return []
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    differing = [ours for ours, theirs in zip(text.splitlines(), expected.splitlines(), strict=False) if ours != theirs]
    return [f"the log has the steps {steps} and {len(differing)} lines that differ, the first: {differing[:1]}"]


def _sample_differences(path: Path, reference: Path) -> list[str]:
    """A step may have been made several times, each time with the samples of the uninterrupted run."""
    expected = dict(line.split(" ", 1) for line in reference.read_text().splitlines())
    found = []
    lines = path.read_text().splitlines()
    for line in lines:
        step, ids = line.split(" ", 1)
        if expected[step] != ids:
            found.append(f"step {step} saw the samples {ids}, expected {expected[step]}")
    if {line.split(" ", 1)[0] for line in lines} != set(expected):
        found.append("some steps saw no samples")
    return found
