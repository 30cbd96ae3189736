"""Episodes on the page of a run: turn by turn, with their figures; odd ones, too."""

import re

import pytest

from tests.report.pages import Checked, page_of, write_episode_run
from trimtab.report.rollouts import MOST_TURNS, card, conversation


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    return page_of(write_episode_run(tmp_path_factory.mktemp("runs") / "run"))


def turn(text: str, drawn: bool, **more) -> dict:
    return {"role": "assistant" if drawn else "user", "text": text, "tokens": 3, "drawn": drawn, **more}


def test_an_episode_is_shown_turn_by_turn_with_what_was_learnt_apart_from_what_was_read(page):
    assert "Best and worst episodes" in page
    (best,) = re.findall(r"Best of iteration 40</h3>(.*?)</article>", page, re.DOTALL)
    turns = re.findall(r'<li class="(\w+)"><p>(\w+)(.*?)</p><pre>(.*?)</pre>', best)
    assert [kind for kind, *_ in turns] == ["drawn", "world", "drawn", "world", "drawn"]
    assert [role for _, role, *_ in turns] == ["model", "tool", "model", "user", "model"]
    assert [text for *_, text in turns][1:] == ["4", "4", "higher", "6"]
    assert "+1" in turns[-1][2] and all("+" not in facts for _, _, facts, _ in turns[:-1])
    assert "3 turns" in best and "<p class=counted>tool calls 1, guesses 2</p>" in best
    assert "<b>seven</b>" not in page and "&lt;b&gt;seven&lt;/b&gt;" in page, "a model's text stays text"


def test_a_run_of_episodes_has_their_pictures_and_its_time_is_not_counted_twice(page):
    titles = re.findall(r"<figcaption><b>(.*?)</b>", page)
    wanted = {"Turns of an episode", "Episode length", "Tools", "How episodes end", "Time in the environment"}
    assert ">limit</span>" not in page.split("<b>Answer length</b>")[1].split("</figure>")[0]
    assert wanted <= set(titles) and len(titles) == len(set(titles))
    assert "environment" not in page.split("Where the time goes")[1].split("<h2>")[0]


def test_a_long_episode_loses_its_middle():
    row = {"turns": [turn(str(number), number % 2 == 0) for number in range(MOST_TURNS + 10)]}
    shown = conversation(row)
    assert shown.count("<pre>") == MOST_TURNS and "10 turns are not shown" in shown


@pytest.mark.parametrize("turns", [None, "x", 3, [], [1, None], {"role": "user"}])
def test_a_row_without_turns_is_an_answer(turns):
    assert "<pre>said</pre>" in card({"response": "said", "turns": turns, "reward": 1.0})


@pytest.mark.parametrize("odd", [{}, {"tokens": "x", "reward": None, "seconds": float("nan"), "text": 3, "role": 5}])
def test_an_odd_turn_does_not_break_the_page(odd):
    Checked(card({"turns": [odd], "environment": {"a": "b", "c": float("inf")}, "reward": 0.0}))
