import json
import re
import shlex
from argparse import Namespace

import pytest

from trimtab.cli import quickstart, train_grpo, train_sft
from trimtab.cli.main import main
from trimtab.cli.quickstart import SHOWN, Lesson, readable_command


def lesson(folder) -> Lesson:
    return Lesson(Namespace(folder=folder, seed=3, steps=2, iterations=2))


def rows(run) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def success(output: str) -> tuple[int, int]:
    """After SFT and after GRPO, in per cent."""
    found = re.search(r"(\d+)% after SFT, (\d+)% after GRPO", output)
    return int(found[1]), int(found[2])


def test_a_short_quickstart_leaves_models_report_and_samples_also_the_second_time(tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "try it"
    for seed in ("0", "1"):
        words = ["--folder", str(folder), "--steps", "2", "--iterations", "1", "--seed", seed]
        assert main(["quickstart", *words]) == 0
        printed = capsys.readouterr().out
        assert "sort " in printed and "trimtab sft" in printed and "trimtab grpo" in printed
        assert str(folder / "grpo" / "report.html") in printed.replace("\n", "")
        assert [row["step"] for row in rows(folder / "sft")] == [1, 2]
        assert [row["step"] for row in rows(folder / "grpo")] == [0, 1]
        samples = json.loads((folder / "grpo" / "samples.json").read_text())
        assert len(samples) == SHOWN and set(samples[0]) == {"prompt", "before", "after", "reference"}
        page = (folder / "grpo" / "report.html").read_text()
        assert samples[0]["reference"] in page and "1 iteration" in page
        for run in ("sft", "grpo"):
            AutoModelForCausalLM.from_pretrained(folder / run)


@pytest.mark.long
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_the_whole_quickstart_unlearns_the_wrong_habit(seed, tmp_path, capsys):
    folder = tmp_path / "quickstart"
    assert main(["quickstart", "--folder", str(folder), "--seed", seed]) == 0
    before, after = success(capsys.readouterr().out)
    assert before < 50 and after > 90
    # What is printed is what the run itself measured.
    measured = [row["eval_pass_1"] for row in rows(folder / "grpo") if "eval_pass_1" in row]
    assert (round(100 * measured[0]), round(100 * measured[-1])) == (before, after)


@pytest.mark.parametrize("module", [train_sft, train_grpo])
def test_a_training_that_stops_gives_its_exit_code(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_grpo, "main", lambda argv: 1)
    monkeypatch.setattr(module, "main", lambda argv: 130)
    assert main(["quickstart", "--folder", str(tmp_path / "q"), "--steps", "1"]) == 130
    assert "What to try next" not in capsys.readouterr().out


@pytest.mark.parametrize("verb, words", [("sft", quickstart.sft_words), ("grpo", quickstart.grpo_words)])
def test_the_shown_command_is_the_one_that_runs(verb, words, tmp_path):
    command = words(lesson(tmp_path / "a b"))
    pasted = readable_command(verb, command).replace("\\\n", "")
    assert shlex.split(pasted) == ["trimtab", verb, *command]


@pytest.mark.parametrize(
    "words",
    [
        ["--steps", "0"],
        ["--steps", "many"],
        ["--iterations", "0"],
        ["--folder", "a,b"],
        ["--folder", "a_file"],
        ["--speed", "9"],
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("")
    assert main(["quickstart", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trimtab quickstart: error: ") and error.count("\n") == 1
