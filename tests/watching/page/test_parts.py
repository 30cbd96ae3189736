"""The parts of a live page, as functions of a run's folder."""

import json
import re

import pytest

from tests.report.pages import Checked, write_episode_run, write_run
from tests.watching.page.runs import EVIL, add_row, rl_run, write_answers
from trimtab.watching.page.answers import answers
from trimtab.watching.page.boards import IndexBoard, RunBoard
from trimtab.watching.page.document import index_page, run_page
from trimtab.watching.page.script import SCRIPT
from trimtab.watching.page.style import STYLE
from trimtab.watching.page.tokens import tokens


def board(folder) -> RunBoard:
    found = RunBoard(folder, every=0.0)
    found.resting = 0.0
    found.look()
    return found


@pytest.mark.parametrize("job", ["sft", "rm", "prm", "dpo", "kto", "kd", "grpo", "episodes"])
def test_the_page_of_every_job_is_whole_and_fetches_nothing_from_elsewhere(tmp_path, job):
    folder = tmp_path / job
    {"grpo": rl_run, "episodes": write_episode_run}.get(job, lambda folder: write_run(folder, job))(folder)
    page = run_page(board(folder), "x-1", 1, several=False)
    checked = Checked(page)
    assert "Curves" in page and "<svg" in page and "script" in checked.tags and "style" not in checked.tags
    asked = {value for name, value in checked.attributes if name in ("src", "href")}
    assert all(value.startswith(("/", "#", "data:,")) and not value.startswith("//") for value in asked)
    assert not any(name.startswith("on") for name, _ in checked.attributes)
    for text in (page, STYLE, SCRIPT):
        assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text


def test_a_folder_without_a_run_says_so_and_shows_the_run_that_begins_later(tmp_path):
    folder = tmp_path / "later"
    found = board(folder)
    assert "No run here yet" in found.sections["head"][1] and found.sections["curves"][1] == ""
    Checked(run_page(found, "x-1", 1, several=False))
    rl_run(folder)
    found.look()
    assert "iteration 4 of 4" in found.sections["head"][1] and "<svg" in found.sections["curves"][1]


def test_only_what_has_changed_is_new(tmp_path):
    folder = rl_run(tmp_path)
    found = board(folder)
    first = found.version
    assert found.look() == first and found.since(first) == {}
    add_row(folder, 5)
    changed = found.since(first) if found.look() > first else {}
    assert {"head", "curves"} <= changed.keys() and not {"answers", "configuration", "what"} & changed.keys()


def test_a_group_stands_side_by_side_the_best_first(tmp_path):
    html = answers(board(rl_run(tmp_path)).followed.run)
    assert "Answers of iteration 2" in html and "row 7: 4 answers, mean reward 0.375" in html
    assert [float(reward) for reward in re.findall(r"<b>reward ([\d.]+)</b>", html)] == [0.75, 0.5, 0.25, 0]
    assert re.findall(r'data-step="2" data-answer="(\d)"', html) == ["3", "2", "1", "0"]


@pytest.mark.parametrize(("asked", "shown"), [(None, 9), (1, 1), (4, 1), (5, 5), (8, 5), (99, 9), (0, 1)])
def test_the_iteration_shown_is_the_last_one_kept_until_then(tmp_path, asked, shown):
    run = board(rl_run(tmp_path, steps=(1, 5, 9))).followed.run
    html = answers(run, asked)
    assert f"123 {shown}.0" in html and f'data-step="{shown}"' in html
    earlier, later = {1: ("", 5), 5: (1, 9), 9: (5, "")}[shown]
    assert f'data-earlier="{earlier}" data-later="{later}" data-first="1" data-newest="9"' in html


def test_conversations_of_agents_are_there_turn_by_turn(tmp_path):
    html = answers(board(write_episode_run(tmp_path / "run")).followed.run)
    assert "Episodes of iteration 40" in html and html.count('<li class="world">') >= 2
    assert "&lt;tool_call&gt;" in html and "<b>seven</b>" not in html


def test_what_a_model_writes_stays_text(tmp_path):
    folder = rl_run(tmp_path, response=EVIL, prompt=EVIL, label=EVIL, finish=EVIL)
    page = run_page(board(folder), "x-1", 1, several=False)
    row = {"texts": [EVIL, EVIL], "drawn": [1, 1], "log_probs": [-1.0]}
    for html in (page, tokens(row, 1.0)):
        checked = Checked(html)
        assert "img" not in checked.tags and html.count("<script") == (html is page)
        assert "alert(1)&lt;/script&gt;" in html


def classes(html: str) -> list[str]:
    return re.findall(r'<span class="?([^">]*)"?[ >]', html)


def test_tokens_are_coloured_by_log_prob_advantage_and_mask():
    row = {"texts": ["a", "b\n", "world", "c", "d"], "drawn": [2, 1, 2], "log_probs": [-0.001, -5.0, None, -0.6]}
    row |= {"advantages": [[2.0, 1], [-1.0, 1], [0.0, 2]]}
    html = tokens(row, scale=2.0)
    assert classes(html) == ["drawn p0 a3", "drawn p5 b2", "world", "drawn", "drawn p2"]
    assert 'data-facts="-5.000 -1"' in html and "b<i>↵</i>\n" in html
    assert re.findall(r'<li class="(\w+)">', html) == ["drawn", "world", "drawn"]
    Checked(html)


def test_tokens_that_were_left_out_are_counted():
    html = tokens({"texts": list("abc"), "drawn": [3], "log_probs": [-1, -1, -1], "left_out": [2, 4000]}, 0.0)
    assert re.sub("<[^>]*>", "", html) == "ab … 4,000 tokens are not kept … c"


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"texts": 3, "drawn": "x"},
        {"texts": ["a"], "drawn": [9, -1, None]},
        {"texts": ["a"], "drawn": [1]},
        {"texts": ["a"], "drawn": [1], "log_probs": ["x"], "advantages": [[1], 2, [None, 1]], "left_out": [1]},
    ],
)
def test_a_damaged_row_of_tokens_is_no_accident(row):
    Checked(tokens(row, 1.0))


def test_tokens_are_found_as_they_are_appended_and_after_a_run_went_back(tmp_path):
    folder = rl_run(tmp_path)
    found = board(folder).tokens
    assert "2.3" in found.answer(2, 3) and found.answer(3, 0) == ""
    write_answers(folder, steps=(3,))
    assert "3.0" in found.answer(3, 0)
    # A resumed run writes the file anew without what came after its checkpoint.
    kept = [line for line in (folder / "tokens.jsonl").read_text().splitlines() if json.loads(line)["step"] < 2]
    (folder / "new").write_text("\n".join(kept) + "\n")
    (folder / "new").replace(folder / "tokens.jsonl")
    assert found.answer(3, 0) == "" and "1.2" in found.answer(1, 2)
    with (folder / "tokens.jsonl").open("a") as file:
        file.write('{"step": 2, "answer": 0, "texts": ["half')
    assert found.answer(2, 0) == ""


def test_a_file_written_over_with_more_is_read_anew(tmp_path):
    """A new run may get the very file, as the system counts files, that an old one had."""
    folder = rl_run(tmp_path)
    found = board(folder).tokens
    before = found.answer(1, 0)
    text = (folder / "tokens.jsonl").read_text()
    (folder / "tokens.jsonl").write_text('{"step": 7, "answer": 0, "texts": ["new"], "drawn": [1]}\n' + text)
    assert before and found.answer(1, 0) == before and ">new<" in found.answer(7, 0)


def test_advantages_of_one_iteration_have_one_scale(tmp_path):
    found = board(rl_run(tmp_path)).tokens  # -1.5, -0.5, 0.5, 1.5
    assert ["a3" in found.answer(2, 3), "b3" in found.answer(2, 0), "a1" in found.answer(2, 2)] == [True] * 3


def test_several_runs_have_an_index(tmp_path):
    boards = [
        RunBoard(folder, 0.0) for folder in (rl_run(tmp_path / "a"), write_run(tmp_path / "b", "sft"), tmp_path / "c")
    ]
    index = IndexBoard(boards, 0.0)
    index.look()
    page = index_page(index, "x-1")
    Checked(page)
    assert all(f"href='/run/{number}'" in page for number in (1, 2, 3)) and "held-out success" in page
    assert boards[0].look() == 1 and "<svg" in boards[0].sections["curves"][1], "drawn whole when it is opened"
    assert "all runs" in run_page(boards[0], "x-1", 1, several=True)
