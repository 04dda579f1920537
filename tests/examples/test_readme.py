"""The README: its program runs, and its tables name what there is."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from trainer_kit import TrainerConfig, callbacks, exceptions

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def table(section: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its two head lines."""
    text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_its_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 5
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks))
    monkeypatch.chdir(tmp_path)
    found = runpy.run_path(str(program))
    assert found["resumed"].step == 30
    assert found["outputs"].shape == (200, 1)
    assert "nothing to do: 30 of 30 steps" in capsys.readouterr().out
    assert (tmp_path / "runs" / "first" / "model" / "model.safetensors").is_file()


def test_its_table_of_settings_is_complete_and_has_the_defaults() -> None:
    """Contract 45: every setting is described, and none that does not exist."""
    rows = {name.strip("`"): default.strip("`") for name, default, _ in table("Settings")}
    assert list(rows) == list(TrainerConfig.model_fields)
    assert {name: default.replace('"', "'") for name, default in rows.items()} == {
        name: repr(field.default) for name, field in TrainerConfig.model_fields.items()
    }


def test_its_table_of_callbacks_is_complete() -> None:
    assert sorted(name.strip("`") for name, _ in table("Built-in callbacks")) == sorted(callbacks.__all__)


def test_its_table_of_errors_is_complete() -> None:
    root = exceptions.TrainerKitError
    assert sorted(name.strip("`") for name, _ in table("Errors")) == sorted(kind.__name__ for kind in root.__subclasses__())


def test_every_file_that_it_names_is_there() -> None:
    named = set(re.findall(r"\]\(([\w/.]+\.\w+)\)", README)) | set(re.findall(r"^python (\S+\.py)", README, re.MULTILINE))
    named |= set(re.findall(r"&& python (\S+\.py)", README))
    assert len(named) >= 6
    assert [name for name in sorted(named) if not (REPOSITORY / name).is_file()] == []
