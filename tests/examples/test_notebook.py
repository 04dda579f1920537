"""The notebook of the examples, executed by a real kernel in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[2]
NOTEBOOK = REPOSITORY / "examples" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def notebook() -> nbformat.NotebookNode:
    read = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(read)
    return read


def test_is_stored_without_outputs(notebook: nbformat.NotebookNode) -> None:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"


def test_runs_and_learns(notebook: nbformat.NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 42: build, fit, evaluate, predict, export and a second fit, each in a cell."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))  # the kernel starts elsewhere and must find the package also when it is not installed
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    html = [output.data["text/html"] for output in outputs if "data" in output and "text/html" in output.data]
    assert any("BestAccuracy" in text for text in html), "describe() shows as a table"
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    accuracy = float(printed.split("accuracy by scikit-learn: ")[1].split()[0])
    assert accuracy > 0.9
    assert (tmp_path / "runs" / "digits" / "model" / "model.safetensors").is_file()
