"""What ranks do together on their hosts: an error of one is the same error on all of them."""

import pytest

from trainer_kit import MeshStrategy
from trainer_kit.mesh.team import Team
from trainer_kit.testing import run_on_ranks


class Odd(Exception):
    """No other process can take it in."""


def job(failing: list[int], kind: str) -> list:
    """What each method gives or raises on this rank, over the ranks of a context and over those of a group."""
    context = MeshStrategy(device="cpu").build()
    found = []
    for team in (Team.of(context), Team.of_group(context.host.for_background())):

        def action(team=team):
            if team.rank in failing:
                raise Odd(f"no {team.rank}", lambda: None) if kind == "odd" else ValueError(f"no {team.rank}")
            return team.rank

        for method in (team.everywhere, team.on_main):
            try:
                found.append(method(action))
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
                assert any(note.startswith("on rank ") for note in error.__notes__)
    return found


@pytest.mark.parametrize(
    "failing, everywhere, on_main",
    [
        ([], [0, 1], 0),
        ([0], ["ValueError: no 0"] * 2, "ValueError: no 0"),
        ([1], ["ValueError: no 1"] * 2, 0),
        ([0, 1], ["ValueError: no 0"] * 2, "ValueError: no 0"),
    ],
)
def test_an_error_of_one_rank_is_an_error_of_all(failing, everywhere, on_main):
    """Contract 41: that of the lowest rank that failed."""
    results = run_on_ranks(2, job, failing, "plain")
    assert results == [[own, on_main] * 2 for own in everywhere]


def test_an_error_that_cannot_be_sent_is_told_in_words():
    """Contract 41: nobody waits for a rank whose error cannot be pickled."""
    own, other = run_on_ranks(2, job, [0], "odd")
    assert own[0].startswith("Odd: ('no 0'") and other[0].startswith("RuntimeError: Odd: ('no 0'")


def test_one_process_is_a_team():
    """Contract 10: the result or the error itself, and nothing is sent."""
    team, error = Team.of(MeshStrategy(device="cpu").build()), Odd("no")

    def failing():
        raise error

    assert team.is_main and team.is_alone and team.everywhere(lambda: 1) == team.on_main(lambda: 1) == 1
    for method in (team.everywhere, team.on_main):
        with pytest.raises(Odd) as caught:
            method(failing)
        assert caught.value is error and not hasattr(error, "__notes__")
