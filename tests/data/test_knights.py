"""Puzzles as rows of the public sets have them, and the prompt of PaddleNLP's guide."""

import hashlib
import json

import pytest
from datasets import Dataset

from tests.data.rows import write_jsonl
from trimtab.data.conversion import prompt_of
from trimtab.embedded.knights_task import make_puzzles
from trimtab.rewards.verifiers import knights_solution

QUIZ = "Zoey says: Owen is a knave. Who is what?"
TEXT = "(1) Zoey is a knight\n(2) Owen is a knave"
PUZZLE = {"quiz": QUIZ, "names": ["Zoey", "Owen"], "solution": [True, False], "solution_text_format": TEXT}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without(*columns):
    return {name: value for name, value in PUZZLE.items() if name not in columns}


def test_the_prompt_is_the_guides_byte_for_byte():
    """The digest is that of the guide's own example with its question taken out."""
    before, after = prompt_of("\0").encode().split(b"\0")
    assert before.endswith(b"</answer>.\n<|im_end|>\n<|im_start|>user\n")
    assert after == b"\n<|im_end|>\n<|im_start|>assistant\n<think>"
    assert hashlib.sha256(before).hexdigest() == "64806840465c8c36af99ee49107116942bcd78dbfd87b2ca10b335d1c4592802"


@pytest.mark.parametrize("row", [PUZZLE, without("names", "solution"), without("solution_text_format")])
def test_the_solution_may_be_text_or_truth_values(tmp_path, row, trimtab):
    source, made = write_jsonl(tmp_path / "a.jsonl", [row]), tmp_path / "deep" / "b.jsonl"
    assert trimtab(f"kk-data {source} {made}").said == f"1 puzzles in {made}\n"
    assert read(made) == [{"src": [prompt_of(QUIZ)], "tgt": [TEXT]}]


def test_parquet_with_the_columns_of_others_and_several_sources(tmp_path, trimtab):
    rows = [puzzle | {"prompt": [{"role": "user", "content": "p"}], "index": 7} for puzzle in make_puzzles(5, 3)]
    Dataset.from_list(rows).to_parquet(tmp_path / "3ppl_test.parquet")
    second, made = write_jsonl(tmp_path / "more.jsonl", [PUZZLE]), tmp_path / "b.jsonl"
    assert trimtab(f"kk-data {tmp_path}/3ppl_test.parquet,{second} {made}").code == 0
    assert [row["src"] for row in read(made)] == [[prompt_of(row["quiz"])] for row in [*rows, PUZZLE]]
    assert trimtab(f"kk-data {tmp_path}/3ppl_test.parquet {made} --max_samples 2").code == 0
    assert len(read(made)) == 2


def test_every_solution_is_one_that_the_reward_reads(tmp_path, trimtab):
    puzzles, made = make_puzzles(50, 5), tmp_path / "b.jsonl"
    assert trimtab(f"kk-data {write_jsonl(tmp_path / 'a.jsonl', puzzles)} {made}").code == 0
    for row, puzzle in zip(read(made), puzzles, strict=True):
        roles = {name: "knight" if told else "knave" for name, told in zip(puzzle["names"], puzzle["solution"])}
        assert knights_solution(row["tgt"][0]) == roles


@pytest.mark.parametrize(
    "row, words",
    [
        (without("quiz"), "a.jsonl, line 2: no question: it must be text in a column quiz"),
        (PUZZLE | {"quiz": " "}, "a.jsonl, line 2: no question"),
        (without("solution", "solution_text_format"), "a.jsonl, line 2: no solution"),
        (PUZZLE | {"solution": [False, False]}, "line 2: two solutions: '(1) Zoey is a knight"),
        (PUZZLE | {"solution": [True]}, "line 2: names and solution must be lists of the same length"),
        (PUZZLE | {"solution_text_format": "(1) Zoey is a saint\n(2) Owen is a sinner"}, "'(1) Zoey is a saint"),
        (without("names") | {"solution_text_format": "(1) Zoey is a knight\n(2) Zoey is a knave"}, "for everybody"),
        ({"src": ["p"], "tgt": ["t"]}, "these rows have src and tgt already"),
    ],
)
def test_a_row_that_is_no_puzzle_is_named_and_nothing_is_written(tmp_path, row, words, trimtab):
    rows = [row] if "src" in row else [PUZZLE, row]
    source, made = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "b.jsonl"
    assert words in trimtab(f"kk-data {source} {made}").mistake and not made.exists()


@pytest.mark.parametrize(
    "words, told",
    [
        ("nowhere.jsonl b.jsonl", "cannot find 'nowhere.jsonl': no such file or folder (see ROWS)"),
        ("a.jsonl b.parquet", "b.parquet: the rows are JSON lines"),
        ("a.jsonl b.jsonl --max_samples 0", "--max_samples 0: give at least 1"),
        ("a.jsonl", "FILE.jsonl"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, words, told, trimtab):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [PUZZLE])
    assert told in trimtab(f"kk-data {words}").mistake
