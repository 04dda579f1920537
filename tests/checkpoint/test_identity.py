"""A checkpoint of another run is refused, with what differs; legitimate changes are told."""

from __future__ import annotations

import pytest

from trainer_kit.checkpoint import check_identity, parameter_digest
from trainer_kit.exceptions import CheckpointError

IDENTITY = {"run_name": "a", "seed": 0, "parameters": "d1", "settings": {"lr": 0.1, "mesh": {"tp": 1}}}


def test_the_same_run_passes():
    assert check_identity(IDENTITY, IDENTITY, "c") == []


@pytest.mark.parametrize(
    "change, words",
    [
        ({"run_name": "b"}, r"c belongs to another run(.|\n)*run_name: 'a' in the checkpoint, 'b' now; set run_name="),
        ({"seed": 1}, r"seed: 0 in the checkpoint, 1 now; set seed="),
        ({"parameters": "d2"}, r"the model has other parameters"),
        ({"seed": 1, "parameters": "d2"}, r"seed(.|\n)*parameters"),
    ],
)
def test_another_run_is_refused_with_what_differs(change, words):
    with pytest.raises(CheckpointError, match=words):
        check_identity(IDENTITY, IDENTITY | change, "c")


def test_other_differences_are_told():
    """B28: settings may change on a resume."""
    now = IDENTITY | {"settings": {"lr": 0.2, "mesh": {"tp": 2}}, "num_samples": 5}
    assert check_identity(IDENTITY, now, "c") == [
        "settings.lr: 0.1 in the checkpoint, 0.2 now",
        "settings.mesh.tp: 1 in the checkpoint, 2 now",
        "num_samples: absent in the checkpoint, 5 now",
    ]


def test_the_digest_changes_with_names_and_shapes_only():
    base = [("a", (2, 3)), ("b", (4,))]
    assert parameter_digest(base) == parameter_digest(reversed(base)) == parameter_digest([("a", [2, 3]), ("b", [4])])
    others = [[("a", (3, 2)), ("b", (4,))], [("a", (2, 3)), ("c", (4,))], [("a", (2, 3))], [("a", (2,)), ("b", (3, 4))]]
    assert len({parameter_digest(rows) for rows in [base, *others]}) == 5
