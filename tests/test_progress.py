import sys
import types

import pytest

from trimtab.progress import RunProgress, notebook_display


class Cell:
    def __init__(self):
        self.shown = []

    def display(self, picture):
        self.shown.append(picture)

    update = display


@pytest.fixture
def notebook(monkeypatch):
    """A kernel as far as it is asked for, without ipywidgets or anything else."""
    cells = []

    def handle():
        cells.append(Cell())
        return cells[-1]

    display = types.ModuleType("IPython.display")
    display.HTML, display.DisplayHandle = str, handle
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return cells


def test_in_a_notebook_one_piece_of_html_is_written_again(notebook, capsys):
    progress = RunProgress("sft", 3)
    for done in (1, 2, 3):
        progress.advance(done, {"loss": "<0.5"})
    progress.close()
    (cell,) = notebook
    assert "sft" in cell.shown[0] and "value=0" in cell.shown[0]
    assert "value=3 max=3" in cell.shown[-1] and "loss &lt;0.5" in cell.shown[-1]
    assert capsys.readouterr().err == ""


def test_elsewhere_there_is_no_cell(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook_display() is None
    plain = types.ModuleType("IPython")  # a terminal's IPython has no kernel
    plain.get_ipython = lambda: object()
    monkeypatch.setitem(sys.modules, "IPython", plain)
    assert notebook_display() is None


def test_a_log_file_gets_lines(capsys):
    progress = RunProgress("sft", 2, quiet_seconds=0)
    progress.advance(1, {"loss": "0.5"})
    progress.advance(2, {"loss": "0.4"})
    progress.close()
    assert [line.split("  ETA")[0] for line in capsys.readouterr().err.splitlines()] == [
        "sft 1/2  loss 0.5",
        "sft 2/2  loss 0.4",
    ]
