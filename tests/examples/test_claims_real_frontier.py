"""Judge, frontier and attack on a real model: what is dealt out, what is shown, and each script in its tiny mode."""

import itertools
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from tests.examples.claims_at_hand import grid, write_pairs
from trimtab.config.option import options_of
from trimtab.config.rl_jobs import TailOptions
from trimtab.embedded import tiny_recipes

import judge  # isort: skip
import real_frontier  # isort: skip
import real_frontier_answers as answers  # isort: skip
import real_frontier_variants as variants  # isort: skip
import real_frontier_views as views  # isort: skip
from estimates import at  # isort: skip

SETTING = "LoRA 16, 2e-4, 2 epochs"


@pytest.fixture
def pairs(tmp_path) -> Path:
    return write_pairs(tmp_path / "pairs.jsonl", 60, lambda number: f"what is {number // 2}?")  # every question twice


def test_no_question_is_on_two_sides_of_the_judge_or_of_the_policy(tmp_path, pairs):
    judge.deal(Namespace(out=tmp_path, pairs=pairs, rows=None, folds=3))
    parts = {path.stem: {judge.question_of(row) for row in grid.read(path)} for path in tmp_path.glob("*-*.jsonl")}
    for name in ("report", "fold-0", "fold-1", "fold-2"):
        assert parts[f"{name}-train"] and parts[f"{name}-measured"]
        assert not parts[f"{name}-train"] & parts[f"{name}-measured"]
        assert name == "report" or not parts[f"{name}-train"] & parts["report-measured"]
    real_frontier.ask(Namespace(out=tmp_path, pairs=pairs, questions=None))
    trained = {row["prompt"] for row in grid.read(tmp_path / "prompts.jsonl")}
    held_out = {row["prompt"]: row["split"] for row in grid.read(tmp_path / "held_out.jsonl")}
    assert not trained & held_out.keys()
    assert {q for q, split in held_out.items() if split == "reported"} == parts["report-measured"]


def test_the_setting_is_chosen_by_folds_that_all_have_and_never_by_the_report():
    def fold(setting: str, data: str, *ahead: float) -> dict:
        return {"stage": "fold", "state": "done", "setting": setting, "data": data, "ahead": list(ahead)}

    rows = [fold("a", "0", 1, 1, -1), fold("b", "0", 1, -1, -1), fold("b", "1", 1, 1, 1)]
    rows += [{"stage": "final", "state": "done", "setting": "b", "seed": 1, "ahead": [1, 1]}]
    assert judge.chosen(rows) == "a"
    assert judge.accuracy([1, 0, -1, -1]) == pytest.approx(0.375)


def synthetic(method: str, weight: float, reward: float, kl: float, spread: float, seed: int = 1) -> dict:
    """A run whose answers to 30 prompts, the first 10 of them to choose by, are spread around a reward."""
    numbers = np.random.default_rng([seed, int(1000 * weight)]).normal(size=(2, 30, 5))
    splits = ["chosen_by"] * 10 + ["reported"] * 20
    return {"state": "done", "method": method, "kl_weight": weight, "seed": seed, "group": 5, "splits": splits,
            "rewards": (reward + spread * numbers).ravel().tolist(), "kl": [kl] * 300}  # fmt: skip


def two_lines(spread: float) -> list[dict]:
    """The model before training, and two weights of each method; `spread`: RePULSe's."""
    rows = [synthetic(views.BEFORE, 0, 0.0, 0.0, 1.0)]
    rows += [synthetic("REINFORCE", w, r, k, 1.0) for w, r, k in ((0.2, 0.5, 1.0), (0.1, 1.0, 2.0))]
    return rows + [synthetic("RePULSe", w, r, k, spread) for w, r, k in ((0.2, 0.6, 1.1), (0.1, 1.1, 2.2))]


def test_methods_are_compared_where_they_match(tmp_path, capsys):
    rows = two_lines(spread=0.2)
    assert views.alike(rows) == ["REINFORCE 0.1 1", "RePULSe 0.1 1"]
    threshold = answers.threshold_of(rows, 0.05)
    assert threshold == pytest.approx(-1.645, abs=0.5)
    views.table(rows, "reported", threshold, tmp_path)
    shown = capsys.readouterr().out
    assert "reported: 20 prompts, 200 answers" in shown
    matched = [line for line in shown.splitlines() if line.count("|") == 4 and "to" in line]
    assert len(matched) == 6
    for line in matched:  # a narrower spread at the same reward has a better tail
        gain = float(line.split("|")[3].split()[0])
        assert gain > 0.5
    views.draw(rows, "reported", threshold, tmp_path)
    assert (tmp_path / "real_frontier.png").exists()


def test_variants_stand_beside_the_lines_and_change_nothing_else(tmp_path, capsys):
    rows = two_lines(spread=0.9)
    views.table(rows, "reported", -1.0, tmp_path)
    without = capsys.readouterr().out
    course = {"reward": [0.1, 0.8], "proposal_reward": [0.0, -0.5], "proposal_effective_samples": [2.0, 1.5]}
    near = synthetic("RePULSe, beta -1", 0.25, 0.8, 1.5, 0.3) | {"beta": -1.0, "updates": 9, "course": course}
    far = synthetic("RePULSe, kappa 0.1", 0.25, 1.6, 3.0, 0.3)
    views.table([*rows, near, far], "reported", -1.0, tmp_path)
    shown = capsys.readouterr().out
    assert shown.startswith(without)
    assert views.alike([*rows, near, far]) == views.alike(rows)
    line, beside, *_ = [line for line in shown.splitlines() if line.startswith("| RePULSe, ")]
    assert all(float(cell.split()[0]) < -0.5 for cell in line.split("|")[8:12])  # a narrower spread at the same place
    assert beside.startswith("| RePULSe, kappa 0.1 | 0.25 | 1 |") and beside.endswith(" | – | – | – | – |")
    assert "REINFORCE's line together" not in shown  # two are too few
    rows += [near, far, synthetic("RePULSe, kappa 0.004", 0.25, 0.7, 1.3, 0.3)]
    for split, column in (("reported", True), ("all", False)):
        views.table(rows, split, -1.0, tmp_path)
        told = capsys.readouterr().out
        assert "All 3 less REINFORCE's line together" in told and ("Spearman" in told) is column
    assert told.startswith("all: 30 prompts, 300 answers")
    assert "| RePULSe, beta -1 | 0.25 | 1 | 9 | 0.10, 0.80 | 0.00, -0.50 | – | 2.00, 1.50 | " in shown


def test_what_all_settings_share_is_told_apart_from_what_each_has_of_its_own():
    numbers = np.random.default_rng(0)
    of_line, of_one = 0.3 * numbers.normal(size=4000), 0.1 * numbers.normal(size=(12, 4000))
    places = np.linspace(-0.2, 0.2, 12)[:, None]
    less = np.concatenate([places, places + of_line + of_one], axis=1)
    for moved in (0.0, -2.0):  # by a line that is too high
        mean, shared, own, between, wide, below = variants.summary(less + moved)
        assert mean.startswith(f"{moved:.2f} (") and float(between) == pytest.approx(places.std(ddof=1), abs=0.001)
        assert float(shared) == pytest.approx(0.3, abs=0.02) and float(own) == pytest.approx(0.1, abs=0.01)
        assert 2.1 < float(wide) < 2.9  # one comparison would have 1.96, twelve without anything in common 2.9
        assert below == ("12 of 12" if moved else "0 of 12")
    assert variants.spearman(np.exp(places[:, 0]), places[:, 0]) == pytest.approx(1)


def test_a_line_goes_on_a_little_beyond_its_ends():
    assert at(2.1, [1.0, 2.0], [0.0, 1.0], 0.2) == pytest.approx(1.1)
    assert at(0.9, [2.0, 1.0], [1.0, 0.0], 0.2) == pytest.approx(-0.1)
    assert at(2.1, [1.0, 2.0, 2.0], [0.0, 1.0, 3.0], 0.2) is None
    assert at(2.1, [1.0, 2.0], [0.0, 1.0]) is None and at(2.3, [1.0, 2.0], [0.0, 1.0], 0.2) is None


def test_the_policys_own_answers_as_a_proposal():
    row = synthetic("RePULSe", 0.1, 0.0, 1.0, 1.0) | {"beta": -2.0}
    run = answers.Answers(row, "reported")
    run.rewards = np.array([[0.0, 0, 0, 0, 0], [-50, 1, 1, 1, 1]])
    assert variants.weighed(run, -1.0) == pytest.approx((3, -25, 50))  # all five, and one alone


def test_all_settings_sample_equally_many_answers_and_are_options_of_the_command(tmp_path, monkeypatch):
    said: list[list[str]] = []
    monkeypatch.setattr("trimtab.cli.train_tail.main", lambda words: said.append(words) or 3)
    settings = [*real_frontier.METHODS, *real_frontier.VARIANTS]
    for setting in settings:
        with pytest.raises(SystemExit):
            real_frontier.main(["cell", "--attacked", f"{setting} 0.25 1", "--out", str(tmp_path), "--model", "m"])
    known = options_of(TailOptions)
    for words in said:
        word = dict(pair for pair in itertools.pairwise(words) if pair[0].startswith("--"))
        assert {name[2:] for name in word} <= known.keys()
        groups = 1 + int(word.get("--proposal_updates", 1)) if word["--method"] == "repulse" else 1
        assert 20_000 - 200 * groups < 200 * groups * int(word["--max_steps"]) <= 20_000
    pushed = [tuple(words[words.index("--alpha") :]) for words in said if "repulse" in words]
    assert len(said) == len(settings) and len(set(pushed)) == len(pushed)  # no two alike


def test_settings_have_seeds_of_their_own_and_come_after_the_first_comparison(tmp_path, pairs, monkeypatch):
    named: list[str] = []
    monkeypatch.setattr(grid, "run", lambda jobs, *_, **__: named.extend(job.name for job in jobs) or [])
    words = ["--model", "m", "--judge", "j", "--out", str(tmp_path), "--pairs", str(pairs)]
    words += ["--methods", "REINFORCE", "--weights", "REINFORCE=0.5", "--variants", "RePULSe, beta -1"]
    real_frontier.main(["run", *words, "--seeds", "2", "3", "--variants_seeds", "2", "3"])
    line, setting = "reinforce-kl0.5", "repulse_beta_-1-kl0.25"
    assert named[1:] == [f"{line}-s2", f"{setting}-s2", f"{setting}-s3", f"{line}-s3"]


def test_a_course_is_told_in_parts():
    told = real_frontier.course([{"reward": float(step), "kappa": 1.0} for step in range(12)])
    assert told == {"reward": [0.5, 2.5, 5.0, 7.5, 10.0], "kappa": [1.0] * 5}
    assert real_frontier.course([{"reward": 1.0}]) == {"reward": [1.0]}


def test_answers_are_those_of_their_prompts():
    row = {"method": "a", "kl_weight": 1.0, "seed": 1, "group": 2, "splits": ["chosen_by", "reported", "reported"],
           "rewards": [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23], "kl": [0.0] * 12}  # fmt: skip
    assert answers.Answers(row, "reported").rewards.tolist() == [[10, 11, 12, 13], [20, 21, 22, 23]]


def test_attacks_are_counted_goal_by_goal(capsys):
    def row(method: str, goal: str, worst: float) -> dict:
        return {"attacked": method, "kl_weight": 0.1, "seed": 1, "goal": goal, "stopped_early": False,
                "before": [1.0, 0.5], "after": [1.0, worst]}  # fmt: skip

    rows = [row("REINFORCE", f"goal {i}", -2.0) for i in range(8)] + [
        row("RePULSe", f"goal {i}", 0.0) for i in range(8)
    ]
    views.attacks(rows, -1.0)
    shown = capsys.readouterr().out
    assert "| 8 | 0 | 0 (0 to 32 %) | 8 (68 to 100 %) |" in shown
    assert "| 0.00 % (0.00 to 32.44) | 50.00 % (" in shown
    assert "goals with a bad reply after the attack, the same 8 goals: -100.0 points" in shown
    assert "bad replies after the attack, the same 8 goals: -50.0 points" in shown


@pytest.mark.long
def test_judge_frontier_and_attack_run_one_after_the_other(tmp_path, pairs, monkeypatch, capsys):
    tiny_recipes.write(tmp_path / "task")
    model = str(tmp_path / "task" / "llama")
    made = tmp_path / "judge"
    words = ["--model", model, "--pairs", str(pairs), "--out", str(made), "--folds", "2", "--settings", SETTING]
    assert judge.main([*words, "--seeds", "1", "--more", "max_len=64"]) == 0
    assert f"| {SETTING} (chosen) |" in capsys.readouterr().out
    goals = tmp_path / "goals.csv"
    goals.write_text("goal,target\nsay one,one is\nsay two,two is\nsay six,six is\n")
    out = tmp_path / "real"
    words = ["--model", model, "--pairs", str(pairs), "--judge", str(made / "judge-1"), "--out", str(out)]
    words += ["--group", "4", "--prompts", "2", "--tokens", "4", "--answers", "16", "--held_out", "8", "--seeds", "1"]
    words += ["--weights", "REINFORCE=0.1,0.05", "RePULSe=0.1,0.05", "--threshold", "0"]
    assert real_frontier.main(["run", *words, "--variants", "RePULSe, 2 proposal updates"]) == 0
    of_attack = ["--goals", str(goals), "--steps", "2", "--width", "4", "--replies", "6", "--parts", "2"]
    assert real_frontier.main(["attack", *words, *of_attack]) == 0
    capsys.readouterr()
    assert real_frontier.main(["table", "--out", str(out), "--share_bad", "0.2"]) == 0
    shown = capsys.readouterr().out
    assert "| RePULSe, 2 proposal updates | 0.25 | 1 | 1 |" in shown  # of 16 answers one update can be made
    assert "| RePULSe | 0.05 | 1 |" in shown and "after the attack, the same 3 goals" in shown
