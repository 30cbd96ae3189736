import json
import shlex

import pytest

from trimtab.cli import quickstart, train_sft
from trimtab.cli.main import main


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))


def success_after(output: str) -> int:
    return int(output.split("% before, ")[1].split("%")[0])


def test_a_short_quickstart_leaves_model_report_and_samples_also_the_second_time(tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "try it"
    for seed in ("0", "1"):
        assert main(["quickstart", "--folder", str(folder), "--steps", "2", "--seed", seed]) == 0
        printed = capsys.readouterr().out
        assert "sort " in printed and "% before" in printed
        assert str(folder / "sft" / "report.html") in printed.replace("\n", "")
        rows = [json.loads(line) for line in (folder / "sft" / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2]
        samples = json.loads((folder / "sft" / "samples.json").read_text())
        assert len(samples) == quickstart.SHOWN and set(samples[0]) == {"prompt", "before", "after", "reference"}
        page = (folder / "sft" / "report.html").read_text()
        assert samples[0]["reference"] in page and "2 steps" in page
        AutoModelForCausalLM.from_pretrained(folder / "sft")


@pytest.mark.long
def test_the_whole_quickstart_learns_to_sort(tmp_path, capsys):
    assert main(["quickstart", "--folder", str(tmp_path / "quickstart")]) == 0
    assert success_after(capsys.readouterr().out) > 90


def test_a_training_that_stops_gives_its_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_sft, "main", lambda argv: 130)
    assert main(["quickstart", "--folder", str(tmp_path / "q"), "--steps", "1"]) == 130
    assert "What to try next" not in capsys.readouterr().out


def test_the_shown_command_is_the_one_that_runs(tmp_path):
    command = quickstart.sft_command(tmp_path / "a b", tmp_path / "run", tmp_path / "ckpt", seed=3)
    pasted = quickstart.readable_command(command).replace("\\\n", "")
    assert shlex.split(pasted) == ["trimtab", "sft", *command]


@pytest.mark.parametrize(
    "words", [["--steps", "0"], ["--steps", "many"], ["--folder", "a,b"], ["--folder", "a_file"], ["--speed", "9"]]
)
def test_a_mistake_is_one_line_and_exit_code_2(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("")
    assert main(["quickstart", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trimtab quickstart: error: ") and error.count("\n") == 1
