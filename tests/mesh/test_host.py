"""Small exchanges between hosts, and agreement on what all ranks do, with one rank and with several."""

import os
import time

from tests.mesh.support import build
from trainer_kit import MeshStrategy
from trainer_kit.exceptions import StateError
from trainer_kit.mesh.calls import Call, absence, difference
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import default_store


def test_one_process_exchanges_with_itself():
    """Contract 10."""
    context = MeshStrategy(device="cpu").build()
    host = context.host
    assert host.sum([1.5, 2.0]) == [1.5, 2.0] and host.start_sum([3.0])() == [3.0]
    assert host.exchange("a") == ["a"] and host.broadcast("a") == "a" and host.for_background() is None
    host.barrier()
    host.agree("export()")
    with context.main_process_first(), context.long_timeout(), context.short_timeout():
        pass


def job_exchange() -> list:
    context = build()
    host, rank = context.host, context.rank
    third = host.start_sum([1e-17, 1.0]) if rank else host.start_sum([1.0, 2.0**60])
    host.barrier()
    first = host.for_background()
    return [
        host.sum([1.0, float(rank), 0.1]),
        third(),
        host.sum([]),
        host.exchange({"rank": rank}) if host.gather(rank) == ([0, 1, 2] if rank == 0 else None) else "wrongly gathered",
        host.broadcast([f"from {rank}"]),
        first is host.for_background() and first is not build().data_group,
    ]


def test_values_of_three_ranks():
    """Sums are in float64 and the same bits on every rank."""
    found = run_on_ranks(3, job_exchange)
    assert found[0] == found[1] == found[2]
    total, third, nothing, exchanged, sent, own = found[0]
    assert total[:2] == [3.0, 3.0] and abs(total[2] - 0.3) < 1e-15
    assert third == [1.0, 2.0**60] and nothing == []
    assert exchanged == [{"rank": 0}, {"rank": 1}, {"rank": 2}] and sent == ["from 0"] and own


def said(agree, *arguments: str) -> str | None:
    """What an `agree` raises."""
    try:
        agree(*arguments)
    except StateError as error:
        return str(error)
    return None


def job_agree() -> list:
    context = build()
    host, rank = context.host, context.rank
    found = [said(host.agree, "fit()"), said(host.agree, "export()" if rank == 0 else "save_checkpoint()")]
    found.append(said(host.agree, "evaluate()", f"name 'v{rank}'"))
    found += [said(host.agree, "fit()") for _ in range(3)]
    host.barrier()
    return found


def test_ranks_in_different_calls_are_told_where_the_others_are():
    """Contract 41: on every rank, at once; afterwards they agree again."""
    for found in run_on_ranks(2, job_agree):
        assert len(found) == 6
        assert found[0] is None
        assert "export() was called on rank 0, while rank 1 is in save_checkpoint()" in found[1]
        assert "evaluate() was called with name 'v0' on rank 0, but with name 'v1' on rank 1" in found[2]
        assert found[3:6] == [None] * 3


def job_number_of_keys() -> list[int]:
    context, found = build(), []
    for count in (2, 10):
        for _ in range(count):
            context.host.agree("evaluate()")
        context.host.barrier()
        found.append(default_store().num_keys())
        context.host.barrier()
    return found


def test_agreements_leave_nothing_behind():
    """A run of a year must not fill the store."""
    for before, after in run_on_ranks(2, job_number_of_keys):
        assert before == after


def job_absent(late: str) -> list:
    """Rank 0 alone calls export(). Rank 1 comes later, to the same call or to the next one."""
    context = build()
    host = context.host
    host.agree_timeout = 0.3
    first = said(host.agree, "export()") if context.rank == 0 else None
    host.barrier()
    if context.rank == 1 and late == "export()":
        first = said(host.agree, late)
    return [first, said(host.agree, "fit()"), said(host.agree, "export()")]


def test_a_call_on_one_rank_alone_fails_fast():
    """B138 and contract 41: with the rank that is missing; the ranks find together again in the next call."""
    alone, other = run_on_ranks(2, job_absent, "fit()")
    assert alone == ["rank 1 did not come to export() within 0.3 s; it is collective, call it on every rank", None, None]
    assert other == [None, None, None]


def test_a_rank_that_comes_too_late_does_not_go_on_alone():
    """Contract 41: the first verdict is that of all."""
    alone, other = run_on_ranks(2, job_absent, "export()")
    assert alone[1:] == other[1:] == [None, None]
    assert other[0] == f"{alone[0]}; this rank came later"


def test_what_is_said_of_many_ranks():
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 ... did not come to fit() within 25 s" in absence(range(1, 20), "fit()", 25.0)
    calls = [Call("fit()", "", 1)] * 3 + [Call("fit()", "10 steps", 1)]
    assert difference(calls) == "fit() was called with nothing on rank 0, but with 10 steps on rank 3; every rank must ask for the same"
    assert difference(calls[:3]) == ""


def job_main_first(folder: str, fails: bool) -> object:
    context = build()
    path = os.path.join(folder, "data")
    try:
        with context.main_process_first():
            if context.is_main:
                time.sleep(0.2)
                if fails:
                    raise OSError("no space")
                with open(path, "w") as file:
                    file.write("here")
            with open(path) as file:
                return file.read()
    except (OSError, StateError) as error:
        return type(error).__name__, str(error)


def test_the_main_process_goes_first(tmp_path):
    assert run_on_ranks(2, job_main_first, str(tmp_path), False) == ["here", "here"]


def test_an_error_of_the_main_process_reaches_the_others(tmp_path):
    """Contract 41: nobody waits for a rank 0 that failed in front of the others."""
    main, other = run_on_ranks(2, job_main_first, str(tmp_path), True)
    assert main == ("OSError", "no space")
    assert other[0] == "StateError" and "OSError: no space" in other[1] and "rank 0" in other[1]


def job_error_after_main() -> str:
    context = build()
    try:
        with context.main_process_first():
            if not context.is_main:
                raise KeyError("only here")
    except KeyError as error:
        return str(error)
    return "fine"


def test_an_error_after_the_main_process_is_its_own():
    assert run_on_ranks(2, job_error_after_main) == ["fine", "'only here'"]
