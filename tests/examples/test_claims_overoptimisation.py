import json
from pathlib import Path

import pytest

from tests.examples.claims_at_hand import grid, here, small_model, write_pairs

import estimates  # isort: skip
import overoptimisation  # isort: skip
import overoptimisation_job  # isort: skip
import overoptimisation_report as report  # isort: skip

SMALL = """--proxy_pairs 8 --heldout_pairs 4 --seeds 1 --iterations 2 --prompts 2 --answers 2 --longest 6 --max_len 128
    --curve 1 --most 4 --eval_prompts 2 --no-bf16"""
SPOKEN = "\n\nHuman: Hello\n\nAssistant: Hi\n\nHuman: Sort 21\n\nAssistant: "


def test_pairs_may_be_texts_or_messages():
    asked = [{"role": "user", "content": "Sort 21"}]
    answers = {name: [{"role": "assistant", "content": said}] for name, said in (("chosen", "12"), ("rejected", "21"))}
    whole = {name: [*asked, *answer] for name, answer in answers.items()}
    assert overoptimisation.as_pair(whole, "row 1") == {"prompt": asked, **answers}
    assert overoptimisation.as_pair({"prompt": asked, **answers}, "row 1") == {"prompt": asked, **answers}
    told = overoptimisation.as_pair({"chosen": f"{SPOKEN}12", "rejected": f"{SPOKEN}21"}, "row 1")
    assert [message["content"] for message in told["prompt"]] == ["Hello", "Hi", "Sort 21"]
    assert told["chosen"] == answers["chosen"]


def test_a_row_that_cannot_be_read_is_named_and_one_of_two_prompts_is_no_pair():
    for rejected in ("21", None):
        with pytest.raises(SystemExit, match="row 7, rejected"):
            overoptimisation.as_pair({"chosen": f"{SPOKEN}12", "rejected": rejected}, "row 7")
    for other in (f"{SPOKEN}21".replace("Hello", "Hullo"), f"{SPOKEN}21\n\nHuman: No\n\nAssistant: 12"):
        assert overoptimisation.as_pair({"chosen": f"{SPOKEN}12", "rejected": other}, "row 7") is None


def asked(number: int) -> str:
    return f"sort {number % 20}"


def test_no_prompt_is_in_two_splits(tmp_path: Path):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 60, asked)  # three of every prompt
    options = overoptimisation.argparse.Namespace(pairs=pairs, folder=tmp_path, heldout_pairs=10, proxy_pairs=10)
    overoptimisation.split(options)
    splits = {name: grid.read(tmp_path / "data" / f"{name}.jsonl") for name in ("heldout", "proxy", "gold", "train")}
    assert sum(len(splits[name]) for name in ("heldout", "proxy", "gold")) == 60
    prompts = {name: {json.dumps(row["prompt"]) for row in rows} for name, rows in splits.items()}
    assert not prompts["heldout"] & prompts["train"] and not prompts["proxy"] & prompts["gold"]
    assert splits["train"] == splits["proxy"] + splits["gold"]


def test_gains_are_over_the_start_and_gold_may_fall():
    rows = [
        {"job": "ppo-pairs-0-1", "step": 0, "eval_proxy": 0.5, "eval_gold": 0.25},
        {"job": "ppo-pairs-0-1", "step": 1, "kl_answer": 0.1, "length": 9},
        {"job": "ppo-pairs-0-1", "step": 10, "kl_answer": 4.0, "length": 8, "eval_proxy": 1.5}
        | {"eval_gold": 0.5, "eval_gold_low": 0.4, "eval_gold_high": 0.6},
        {"job": "ppo-pairs-0-1", "step": 20, "kl_answer": 9.0, "length": 7, "eval_proxy": 2.5, "eval_gold": 0.0},
    ]
    found = [(point["kl"], point["proxy"], point["gold"]) for point in report.curve(rows, "ppo-pairs-0-1")]
    assert found == [(0.0, 0.0, 0.0), (4.0, 1.0, 0.25), (9.0, 2.0, -0.25)]
    told = report.table(rows)
    assert "| 10 | 4.0 | +1.00 | +0.25 ± 0.10 |" in told and "| 20 | 9.0 | +2.00 | -0.25 |" in told


def test_texts_that_are_alike_are_told_once():
    said = [{"prompt": str(number), "response": "so" if number else "no"} for number in range(4)]
    rows = [{"job": "ppo-pairs-0-1", "step": step, "said": said[:step]} for step in (1, 4)]
    told = report.table(rows).splitlines()
    assert told[0].startswith("ppo-pairs-0-1, iteration 4: 2 different texts of 4")
    assert told[1:] == ['- 3 x "so"', '- 1 x "no"']


def run_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[dict]:
    here(monkeypatch, overoptimisation_job)
    model, pairs = small_model(tmp_path / "model"), write_pairs(tmp_path / "pairs.jsonl", 20, asked)
    runs = tmp_path / "runs"
    words = ["--model", str(model), "--pairs", str(pairs), "--folder", str(runs), *SMALL.split()]
    assert overoptimisation.main(["run", *words, *more]) == 0
    overoptimisation.main(["draw", "--folder", str(runs), "--figure", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    return grid.read(runs / "results.jsonl")


def test_gold_is_asked_and_not_paid_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = run_grid(tmp_path, monkeypatch, "--labels", "pairs", "--kl", "0.1")
    steps = [row for row in rows if row["job"] == "ppo-pairs-0.1-1" and "step" in row]
    assert [row["step"] for row in steps] == [0, 1, 2]
    for row in steps[1:]:
        assert row["reward"] == pytest.approx(row["proxy"]) and row["gold"] != row["proxy"]
        assert "eval_gold_low" in row and "kl_answer" in row
    said = [[answer["prompt"] for answer in row["said"]] for row in steps]
    assert said[0] and said[0] == said[1] == said[2]  # the same prompts every time, also in a run that is cut
    best = [row for row in rows if "n" in row]
    assert [row["n"] for row in best] == [1, 2] and best[1]["kl_answer"] == estimates.kl_of_best_of(2)
    assert best[1]["proxy"][0] > best[0]["proxy"][0]


@pytest.mark.long
def test_a_proxy_may_learn_from_what_gold_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = run_grid(tmp_path, monkeypatch, "--labels", "pairs,gold", "--kl", "0,0.1")
    finals = {row["job"] for row in rows if row.get("final")}
    judges = {"gold", "proxy_pairs", "proxy_gold", "best-pairs", "best-gold"}
    assert finals == judges | {f"ppo-{label}-{weight}-1" for label in ("pairs", "gold") for weight in ("0", "0.1")}
