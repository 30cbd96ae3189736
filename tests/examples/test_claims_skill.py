from itertools import combinations
from pathlib import Path

import pytest

from tests.examples.claims_at_hand import grid, here, small_model

import estimates  # isort: skip
import skill  # isort: skip
import skill_job  # isort: skip
import skill_tasks  # isort: skip

SMALL = """--tasks digits --seeds 1 --iterations 2 --choosing_iterations 1 --prompts 2 --answers 2 --sft_rows 8
    --eval_rows 2 --eval_answers 8 --curve 1 --no-bf16"""


def test_the_best_of_k_is_the_mean_over_all_choices_of_k():
    gold, proxy = [0.3, -1.0, 2.0, 0.1, 0.7], [5.0, 1.0, 2.0, 4.0, 3.0]
    for k in range(1, 6):
        choices = list(combinations(range(5), k))
        found = sum(gold[max(chosen, key=lambda one: proxy[one])] for chosen in choices) / len(choices)
        assert estimates.best_of(gold, proxy, k) == pytest.approx(found)
    right = [True, False, False, True, False]
    misses = [not any(right[one] for one in chosen) for chosen in combinations(range(5), 3)]
    assert estimates.pass_at(right, 3) == pytest.approx(1 - sum(misses) / len(misses))


def test_only_the_answer_line_counts_and_its_spelling_does_not():
    assert skill_tasks.is_right("1 + 2 = 3\nAnswer: 3.", "3")
    assert skill_tasks.is_right("Answer: 14, -2, 3", "['14.0', '-2.0', '3.0']")
    assert not skill_tasks.is_right("3", "3") and skill_tasks.is_right_at_the_end("It is 3.", "3")
    assert not skill_tasks.is_right("Answer: 3\nAnswer: 4", "3")
    assert skill_tasks.parsed("Answer:") is None
    assert not skill_tasks.is_right("Answer: 1234567", "1234568")


def test_solutions_say_why():
    assert skill_tasks.sums({"expression": "42 - 25 - 73"}) == "42 - 25 = 17\n17 - 73 = -56"
    assert skill_tasks.products({"expression": "42 * 25"}).endswith("840 + 210 = 1050")
    assert skill_tasks.euclid({"numbers": [12, 18]}) == "12 mod 18 = 12\n18 mod 12 = 6\n12 mod 6 = 0"
    words = {"knight": "hero", "knave": "villain"}
    said = (("not", ("lying", 1)), ("->", ("telling-truth", 0), ("telling-truth", 1)))  # both are heroes
    tried = skill_tasks.knights({"names": ["A", "B"], "knight_knave_terms": words, "statements": said}).splitlines()
    assert [line.endswith("yes") for line in tried] == [True, False, False, False]


def test_the_form_is_told_apart_from_the_skill():
    found = skill_job.figures(["Answer: 1", "one", "Answer: 2", "it is 1"] * 4, ["1"] * 16, answers=8)
    assert found["parsed"] == 0.5 and found["right_of_parsed"] == 0.5 and found["right_at_the_end"] == 0.5
    assert found["pass_1"][0] == 0.25 and found["pass_8"][0] == 1.0


def test_every_prompt_is_in_one_split(tmp_path: Path):
    options = skill.argparse.Namespace(iterations=4, choosing_iterations=1, prompts=64, eval_rows=100, sft_rows=50)
    skill.make_data(options, "digits", tmp_path)
    prompts = [row["prompt"] for split in skill.SPLITS for row in grid.read(tmp_path / f"{split}.jsonl")]
    assert len(prompts) == len(set(prompts)) == 2 * 100 + 50 + 4 * 64


def test_a_learning_rate_is_chosen_when_all_of_them_were_tried():
    options = skill.argparse.Namespace(tasks=["digits"], methods=["grpo", "ppo"], learning_rates=[1e-5, 3e-5])
    tried = {"choose-digits-grpo-1e-05": 0.5, "choose-digits-grpo-3e-05": 0.25, "choose-digits-ppo-3e-05": 0.5}
    rows = [{"job": job, "final": True, "pass_1": [right, 0, 1]} for job, right in tried.items()]
    assert skill.best_rates(options, rows) == {("digits", "grpo"): 1e-5}
    options.learning_rates = [2e-5]
    assert skill.best_rates(options, []) == {("digits", "grpo"): 2e-5, ("digits", "ppo"): 2e-5}


def run_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, methods: str, rates: str) -> str:
    here(monkeypatch, skill_job)
    model = small_model(tmp_path / "model")
    words = ["--model", str(model), "--folder", str(tmp_path / "runs"), "--methods", methods, "--learning_rates", rates]
    assert skill.main(["run", *words, *SMALL.split()]) == 0
    skill.main(["draw", "--folder", str(tmp_path / "runs"), "--figure", str(tmp_path / "skill.png")])
    assert (tmp_path / "skill.png").stat().st_size > 10_000
    return str(tmp_path / "runs")


def test_the_grid_trains_measures_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    folder = run_grid(tmp_path, monkeypatch, "grpo", "1e-3")
    rows = grid.read(f"{folder}/results.jsonl")
    mine = [row for row in rows if row["job"] == "digits-grpo-1"]
    assert [(row["step"], row["drawn"]) for row in mine if "drawn" in row] == [(0, 0), (1, 4), (2, 8)]
    assert ["eval_pass_8" in row for row in mine] == [True, True, True, False]
    assert {row["job"] for row in rows if row.get("final")} == {"digits-sft", "digits-base", "digits-grpo-1"}
    assert "| digits | GRPO, 0.001 | 1 |" in capsys.readouterr().out


@pytest.mark.long
def test_all_methods_choose_a_learning_rate_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    folder = run_grid(tmp_path, monkeypatch, ",".join(skill.PRESETS), "1e-4,1e-3")
    finals = [row["job"] for row in grid.read(f"{folder}/results.jsonl") if row.get("final")]
    assert len(finals) == len(set(finals)) == 2 + 3 * len(skill.PRESETS)
