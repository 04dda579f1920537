"""JSONLines and CSV: what stands in the files, also after a kill and a resume."""

import csv
import json
import math

import pytest

from trainer_kit.callbacks import CSV, JSONLines
from trainer_kit.exceptions import ConfigurationError


def json_rows(path):
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in path.read_text().splitlines()]


def csv_rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write(fake_trainer, callback, steps, *, step=0):
    trainer = fake_trainer(step=step)
    trainer.start(callback, resumed=step > 0)
    for at in steps:
        trainer.record(callback, at, train__loss=at / 10)
    callback.close()


@pytest.mark.parametrize(("kind", "name"), [(JSONLines, "m.jsonl"), (CSV, "m.csv")])
def test_a_resumed_run_has_one_line_per_step(fake_trainer, tmp_path, kind, name):
    """Contract 30b: steps 1-8, resume from 5, log to 10: 1..10 once each."""
    path = tmp_path / "logs" / name
    write(fake_trainer, kind(path), range(1, 9))
    write(fake_trainer, kind(path), range(6, 11), step=5)
    rows = json_rows(path) if kind is JSONLines else csv_rows(path)
    assert [int(row["step"]) for row in rows] == list(range(1, 11))
    assert [float(row["train/loss"]) for row in rows] == [n / 10 for n in range(1, 11)]


@pytest.mark.parametrize(("kind", "name"), [(JSONLines, "m.jsonl"), (CSV, "m.csv")])
def test_a_line_cut_by_a_kill_is_dropped(fake_trainer, tmp_path, kind, name):
    """Contract 30b."""
    path = tmp_path / name
    write(fake_trainer, kind(path), [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-4])
    write(fake_trainer, kind(path), [4], step=3)
    rows = json_rows(path) if kind is JSONLines else csv_rows(path)
    assert [int(row["step"]) for row in rows] == [1, 2, 4]


@pytest.mark.parametrize(("kind", "name"), [(JSONLines, "m.jsonl"), (CSV, "m.csv")])
def test_a_new_run_moves_the_records_of_an_old_one_aside(fake_trainer, tmp_path, kind, name):
    path = tmp_path / name
    write(fake_trainer, kind(path), [1, 2, 3])
    first = path.read_bytes()
    write(fake_trainer, kind(path), [1, 2])
    second = path.read_bytes()
    (tmp_path / f"{name}.previous-2").write_text("of the user")
    write(fake_trainer, kind(path), [1])
    assert (tmp_path / f"{name}.previous-1").read_bytes() == first
    assert (tmp_path / f"{name}.previous-2").read_text() == "of the user"
    assert (tmp_path / f"{name}.previous-3").read_bytes() == second
    rows = json_rows(path) if kind is JSONLines else csv_rows(path)
    assert [int(row["step"]) for row in rows] == [1]


def test_the_settings_of_an_old_run_go_with_its_records(fake_trainer, tmp_path):
    for seed in (7, 8, 9):
        callback, trainer = JSONLines(tmp_path / "m.jsonl"), fake_trainer()
        trainer.start(callback, settings={"seed": seed})
        trainer.record(callback, 1, train__loss=float(seed))
        callback.close()
    for ending, seed in ((".previous-1", 7), (".previous-2", 8), ("", 9)):
        assert json.loads((tmp_path / f"m.settings.json{ending}").read_text()) == {"seed": seed}
        assert json.loads((tmp_path / f"m.jsonl{ending}").read_text())["train/loss"] == seed


@pytest.mark.parametrize(("kind", "name"), [(JSONLines, "m.jsonl"), (CSV, "m.csv")])
def test_a_foreign_file_is_left_alone(fake_trainer, tmp_path, kind, name):
    path = tmp_path / name
    path.write_text("dear diary\nnothing happened\n")
    with pytest.raises(ConfigurationError, match="line 1 is not a record"):
        fake_trainer(step=3).start(kind(path))
    assert path.read_text() == "dear diary\nnothing happened\n"


@pytest.mark.parametrize(("kind", "name"), [(JSONLines, "m.jsonl"), (CSV, "m.csv")])
def test_records_are_readable_while_the_run_goes_on(fake_trainer, tmp_path, kind, name):
    """B72: nothing waits in a buffer; after `close` there is no file open, and a second fit appends."""
    path, callback, trainer = tmp_path / name, kind(tmp_path / name), fake_trainer()
    trainer.start(callback)
    trainer.record(callback, 1, train__loss=0.5)
    assert '0.5' in path.read_text()
    callback.close()
    callback.close()
    trainer.record(callback, 2, train__loss=0.25)
    assert "0.25" not in path.read_text()
    trainer.step = 1
    trainer.start(callback)
    trainer.record(callback, 2, train__loss=0.125)
    callback.close()
    rows = json_rows(path) if kind is JSONLines else csv_rows(path)
    assert [float(row["train/loss"]) for row in rows] == [0.5, 0.125]


def test_only_the_main_rank_writes(fake_trainer, tmp_path):
    """B70's rule for all output: rank 1 writes nothing."""
    trainer = fake_trainer()
    trainer.context.is_main = False
    for callback in (JSONLines(tmp_path / "a.jsonl"), CSV(tmp_path / "a.csv")):
        trainer.start(callback)
        trainer.record(callback, 1, train__loss=0.5)
        callback.close()
    assert list(tmp_path.iterdir()) == []


def test_json_lines_stay_strict_json_with_values_that_are_not_finite(fake_trainer, tmp_path):
    """B64: a NaN is logged as what it is."""
    trainer, callback = fake_trainer(), JSONLines(tmp_path / "m.jsonl")
    trainer.start(callback)
    trainer.record(callback, 2, a=math.nan, b=math.inf, c=-math.inf, d=1.5)
    callback.close()
    (row,) = json_rows(tmp_path / "m.jsonl")
    assert row == {"step": 2, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.5}
    assert math.isnan(float(row["a"])) and float(row["c"]) == -math.inf


def test_csv_takes_columns_that_appear_later(fake_trainer, tmp_path):
    trainer, callback = fake_trainer(), CSV(tmp_path / "m.csv")
    trainer.start(callback)
    trainer.record(callback, 1, train__loss=0.5)
    trainer.record(callback, 1, val__loss=0.75)
    trainer.record(callback, 2, train__loss=math.nan)
    callback.close()
    assert (tmp_path / "m.csv").read_text() == "step,train/loss,val/loss\n1,0.5,\n1,,0.75\n2,nan,\n"
    again = CSV(tmp_path / "m.csv")
    write(fake_trainer, again, [3], step=2)
    assert csv_rows(tmp_path / "m.csv")[-1] == {"step": "3", "train/loss": "0.3", "val/loss": ""}


@pytest.mark.parametrize("kind", [JSONLines, CSV])
def test_settings_are_written_once_per_run_beside_the_records(fake_trainer, tmp_path, kind):
    callback, trainer = kind(tmp_path / "m.txt"), fake_trainer()
    trainer.start(callback, settings={"trainer": {"seed": 7}})
    trainer.record(callback, 1, train__loss=0.5)
    callback.close()
    trainer.step = 1
    trainer.start(callback, resumed=True, settings={"trainer": {"seed": 8}})
    callback.close()
    assert json.loads((tmp_path / "m.settings.json").read_text()) == {"trainer": {"seed": 7}}


def test_a_file_url_is_a_path(fake_trainer, tmp_path):
    """B39."""
    write(fake_trainer, JSONLines(f"file://{tmp_path}/m.jsonl"), [1])
    assert json_rows(tmp_path / "m.jsonl")[0]["step"] == 1
