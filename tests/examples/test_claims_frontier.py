"""The scripts of RePULSe's frontier: what is exact on the toy, and every script in its tiny mode."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from tests.examples.claims_at_hand import grid
from trimtab.embedded import bad_word_task

import estimates  # isort: skip
import frontier  # isort: skip
import frontier_views  # isort: skip
from toy_world import Outcome, World  # isort: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("frontier")
    bad_word_task.write(folder / "task")
    return folder


@pytest.fixture(scope="module")
def world(folder) -> World:
    return World(folder / "task")


def objective(outcome: Outcome, weight: float) -> float:
    return outcome.reward - weight * outcome.kl


def test_answers_are_all_there_and_rewards_are_theirs(world):
    assert world.start_A.exp().sum().item() == pytest.approx(1)
    drawn = torch.multinomial(world.start_A.exp(), 20_000, replacement=True, generator=torch.Generator().manual_seed(0))
    outcome = world.outcome(world.start_A)
    assert world.rewards_A[drawn].mean().item() == pytest.approx(outcome.reward, abs=0.02)
    assert outcome.kl == 0
    worst = world.rewards_A[drawn].sort().values[:200]
    assert outcome.cvar_1 == pytest.approx(worst.mean().item(), abs=0.05)


@pytest.mark.parametrize("weight", [1.0, 0.1])
def test_no_policy_near_the_best_one_is_better(world, weight):
    best = objective(world.best(weight), weight)
    tilted = world.start_A + world.rewards_A / weight
    for scale in (0.01, 1.0):
        noise = scale * torch.randn(len(tilted), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        other = (tilted + noise).log_softmax(0)
        assert objective(world.outcome(other), weight) < best
    assert objective(world.best(1.1 * weight), weight) < best


def test_the_share_of_rewards_in_cvar_is_exact():
    small = World.__new__(World)
    small.rewards_A = torch.tensor([1.0, -3.0, 0.0])
    probabilities = torch.tensor([0.5, 0.1, 0.4])
    assert small.cvar(probabilities, 1.0) == pytest.approx(0.2)
    assert small.cvar(probabilities, 0.05) == pytest.approx(-3)
    assert small.cvar(probabilities, 0.2) == pytest.approx(-1.5)


def test_lines_are_only_read_where_they_are():
    assert estimates.at(0.25, [1, 0, 0.5], [3, 0, 1]) == pytest.approx(0.5)
    assert estimates.at(1.5, [1, 0], [3, 0]) is None
    assert estimates.shared_range([0, 2], [1, 3]) == (1, 2)
    assert estimates.shared_range([0, 1], [2, 3]) is None


def tiny(folder: Path, method: str, monkeypatch, tmp_path: Path) -> list[dict]:
    told = tmp_path / "told"
    monkeypatch.setenv(grid.ROWS, str(told))
    words = ["--methods", method, "--answers", "80", "--group", "8", "--weights", "0.1", "--seeds", "1"]
    assert frontier.main(["cell", "--out", str(folder), *words]) == 0
    return grid.read(told)


def test_a_cell_tells_the_exact_outcome_of_its_models_and_is_shown(folder, world, monkeypatch, tmp_path, capsys):
    rows = tiny(folder, "RePULSe", monkeypatch, tmp_path)
    assert [row["kl_weight"] for row in rows] == [0.1]
    for row in rows:
        assert row["updates"] == 5  # of 80 answers 16 are drawn in an update: 8 by the policy, 8 by the proposal
        model = folder / "runs" / f"repulse-80-kl{row['kl_weight']:g}-s1"
        assert dataclasses.asdict(world.outcome(world.log_probs(model))).items() <= row.items()
        # The command sums over the answers in its own way, in single precision.
        assert row["log_bad_path"][-1] == pytest.approx(row["log_bad"], rel=1e-4)
        assert 1 <= row["proposal_effective_samples"] <= 8
    kept = [{"job": "a", "state": "done"} | row for row in rows]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert frontier.main(["table", "--out", str(folder)]) == 0
    assert "80 sampled answers" in capsys.readouterr().out
    assert frontier.main(["draw", "--out", str(folder)]) == 0
    assert (folder / "frontier.png").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.parametrize("method", [name for name in frontier.SETTINGS if name != "RePULSe"])
def test_every_method_of_the_grid_runs(method, folder, monkeypatch, tmp_path):
    assert len(tiny(folder, method, monkeypatch, tmp_path)) == 1


def test_equal_numbers_of_answers_are_sampled_by_all(folder, monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr("trimtab.cli.train_tail.main", lambda words: said.append(words) or 3)
    for method in frontier.SETTINGS:
        with pytest.raises(SystemExit):
            tiny(folder, method, monkeypatch, tmp_path)
    for words in said:
        word = dict(itertools.pairwise(words))
        updates = int(word["--fit_steps"]) * int(word["--num_episodes"])
        groups = 1 + int(word.get("--proposal_updates", 1)) if word["--method"] == "repulse" else 1
        assert 80 - 5 * 8 * groups < updates * groups * 8 <= max(80, 5 * 8 * groups)


def test_nothing_to_show_is_said(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        frontier.main(["table", "--out", str(tmp_path)])
    assert "holds no result yet" in capsys.readouterr().err


def test_methods_are_read_at_the_same_reward_and_kl_and_variants_stand_beside_them(folder, capsys):
    def row(method: str, weight: float, reward: float, kl: float, decades: float) -> dict:
        return {"method": method, "kl_weight": weight, "answers": 100, "seed": 1, "reward": reward, "kl": kl,
                "log_bad": decades * math.log(10), "cvar_1": 0.0}  # fmt: skip

    rows = [row("REINFORCE", 1, 0.5, 0.1, -2), row("REINFORCE", 0.1, 0.9, 2.1, -4)]
    rows += [row("RePULSe", 1, 0.6, 0.1, -4), row("RePULSe", 0.1, 0.8, 1.1, -8)]
    frontier_views.table([*rows, row("RePULSe, beta -3", 1, 0.7, 0.6, -5)], folder)
    shown = capsys.readouterr().out
    assert "| REINFORCE | -2.50 | -3.00 | -3.50 | -4.00 |" in shown
    assert "| RePULSe | -4.00 | -6.00 | -8.00 | – |" in shown
    assert "| RePULSe, beta -3 | 1 | 0.70 | 0.60 | -5.00 | -6.00 | -2.50 |" in shown
