"""`trimtab watch`: words that are no run, and the commands of its page."""

import pytest

from tests.docs.pages import commands
from tests.report.pages import write_rl_run, write_run


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "note.txt").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    "words, told",
    [
        ("nowhere", "nowhere: no such folder; give the --save_path of a run, or add --wait"),
        ("runs/frist", "did you mean runs/first?"),
        ("empty", "empty: no metrics.jsonl in this folder; give the --save_path of a run"),
        ("runs", "there are runs inside: first"),
        ("note.txt", "note.txt: a file; give the --save_path of a run"),
        ("runs/first --every 0", "--every 0: give seconds"),
        ("runs/first --port 80", "--port has no meaning without --page"),
        ("runs/first --page --port 99999", "--port 99999: give a port"),
        ("runs/first --page --once", "trimtab report"),
        ("", "see trimtab watch --help"),
    ],
)
def test_what_is_no_run_is_one_line_and_exit_code_2(words, told, place, trimtab):
    assert told in trimtab(f"watch {words}").mistake


def test_the_commands_of_the_page_run(tmp_path, monkeypatch, trimtab):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "quickstart" / "sft")
    write_rl_run(tmp_path / "quickstart" / "grpo")
    first, *others = commands("watch")
    assert first == ["trimtab", "quickstart"] and len(others) >= 3
    for words in others:
        if "--page" not in words:  # that one does not end by itself
            assert "● finished" in trimtab(*words[1:]).said
