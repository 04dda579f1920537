"""A few trials of `resume_under_kill.py`, and that its comparison and its deaths would notice."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent


def run(code_or_script, *arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", *code_or_script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_killed_runs_end_as_the_uninterrupted_one():
    """Contracts 17, 26, 27, 29, 30b; B30: a process killed at any operation of a save or at any moment resumes bitwise."""
    done = run([str(HERE / "resume_under_kill.py")], "--trials", 4, "--every-kth", 29)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:5]]
    assert [row[0] for row in rows] == ["synchronous"] * 2 + ["asynchronous"] * 2
    assert all(int(row[-4]) > 0 and int(row[-1]) == 0 for row in rows)  # runs; wrong ones
    assert sum(int(row[-3]) for row in rows) >= 8  # kills
    assert done.stdout.splitlines()[-1].startswith("passed: ")


CHILD = "import sys, torch; from pathlib import Path; from job import train; train(Path(sys.argv[1]), asynchronous=False)"


def test_the_comparison_notices_one_bit_and_one_sample(tmp_path, monkeypatch):
    """A comparison that sees nothing would pass every run."""
    (tmp_path / "one").mkdir()
    done = run(["-c", CHILD], tmp_path / "one")
    assert done.returncode == 0, done.stderr
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    monkeypatch.syspath_prepend(str(HERE))
    from comparison import differences

    one, two = tmp_path / "one", tmp_path / "two"
    assert differences(one, two) == []
    (one / "samples.txt").write_text((one / "samples.txt").read_text().replace("0 [", "0 [1, ", 1))
    weights = load_file(one / "model" / "model.safetensors")
    weights["0.bias"].view(torch.int32)[3] ^= 1
    save_file(weights, one / "model" / "model.safetensors")
    found = differences(one, two)
    assert len(found) == 2 and found[0] == "exported weights: 0.bias differs" and found[1].startswith("step 0 saw the samples [1, ")
    (one / "log.jsonl").write_text((one / "log.jsonl").read_text() + '{"step": 20}\n')
    assert any("the log has the steps" in text for text in differences(one, two))


DEATHS = """
import os, sys
from deaths import DeathByOperation
from trainer_kit.storage import Folder, write_all

for at in (1, 2, 3):
    root = f"{sys.argv[1]}/{at}"
    os.mkdir(root)
    if not os.fork():
        DeathByOperation(f"{root}/watched", at).install()
        os.mkdir(f"{root}/elsewhere")
        folder = Folder(f"{root}/watched")
        folder.make()
        write_all(folder.open("data", "wb"), b"12345678")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_death_by_operation_comes_at_its_operation(tmp_path):
    """Making a folder, opening a file, writing: the process is gone before the numbered operation, or in the middle of the write."""
    done = run(["-c", DEATHS], tmp_path)
    assert done.stdout.split() == ["-9", "-9", "-9"], done.stderr
    assert all((tmp_path / at / "elsewhere").exists() for at in "123")
    assert [(tmp_path / at / "watched").exists() for at in "123"] == [False, True, True]
    assert [(tmp_path / at / "watched" / "data").exists() for at in "123"] == [False, False, True]
    assert (tmp_path / "3" / "watched" / "data").read_bytes() == b"1234"
