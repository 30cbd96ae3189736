"""The time-line of a run whose answers outlive an update: what it says, what it draws, and what it forgives."""

import random
import re

import pytest

from tests.report.pages import page_of, read_lines, write_async_run, write_lines, write_metrics, write_rl_run
from trimtab.report.run_data import TimeSpan, read_run
from trimtab.report.time_line import common, covered, lanes_of, length


def test_the_page_says_how_old_answers_were_and_what_overlapped(tmp_path):
    page = page_of(write_async_run(tmp_path / "run"))
    assert (
        "What was trained had been begun 1.1 updates earlier on average, 4 at most (4 would be allowed). Of the time "
        "in which the trainer learnt, engines wrote for 70 % and rewards were being judged for 20 %. Of an iteration, "
        "the trainer had nothing to do for 25 %." in page
    )
    assert "<dt>mean age in updates</dt><dd>1.1</dd><dd>at most 4; bound: 4</dd>" in page
    titles = re.findall(r"<figcaption><b>(.*?)</b>", page)
    wanted = {"Age of what is trained", "Trainer with nothing to do", "Engines at work", "Groups under way"}
    assert wanted | {"Tokens read again", "Corrected tokens"} <= set(titles)
    assert "Nothing unusual" in page
    assert "<td>engine 1</td><td>writing</td><td>an engine draws tokens</td><td>1 min 50 s</td><td>69 %</td>" in page


def test_the_picture_shows_a_few_iterations_lane_by_lane(tmp_path):
    page = page_of(write_async_run(tmp_path / "run"))
    picture = page.split("<b>Who did what, and when</b>")[1].split("</figure>")[0]
    assert "iterations 18 to 22; seconds since the run began" in picture
    lanes = re.findall(r"<span style=\"top:[^>]*>(.*?)</span>", picture)
    assert lanes == ["trainer", "engine 0", "engine 1", "rewards 0"]
    assert len(re.findall("<rect", picture)) == 5 * (4 + 2 + 2)
    assert "<title>trainer: update 2.5 s, iteration 20</title>" in picture
    starts = [float(x) for x in re.findall(r' x="([^"]*)"', picture)]
    assert min(starts) >= 0 and max(starts) <= 1000


def write_spans(folder, spans) -> None:
    """(lane, what, begin) of spans of a second."""
    names = ("lane", "what", "begin", "end", "iteration")
    write_lines(folder / "time_line.jsonl", [dict(zip(names, (*span, span[-1] + 1, 1))) for span in spans])


def test_an_engine_where_the_policy_is_takes_turns_with_it(tmp_path):
    folder = write_async_run(tmp_path / "run")
    turns = (("trainer", "rollout", 0), ("engine 0", "writing", 0), ("trainer", "update", 1))
    write_spans(folder, turns)
    metrics = read_lines(folder / "metrics.jsonl")
    for row in metrics:
        row.pop("engine_busy", None)  # which such an engine does not have
    write_metrics(folder, metrics)
    page = page_of(folder)
    assert "Trainer, engines and rewards took turns." in page
    assert "<td>trainer</td><td>rollout</td><td>answers are written in these processes" in page
    assert "phase waits" not in page and "the next batch is not there yet" not in page


def test_a_trainer_with_engines_apart_waits_for_its_batch(tmp_path):
    page = page_of(write_async_run(tmp_path / "run"))
    assert "<td>trainer</td><td>waiting</td><td>the next batch is not there yet</td><td>40.0 s</td>" in page
    assert "phase waits" in page and "<td>trainer</td><td>rollout</td>" not in page


def test_a_synchronous_run_has_no_lanes_even_in_an_asynchronous_runs_folder(tmp_path):
    folder = write_rl_run(tmp_path / "run")
    (write_async_run(tmp_path / "earlier") / "time_line.jsonl").rename(folder / "time_line.jsonl")
    page = page_of(folder)
    assert "Who did what" not in page and "Age of" not in page and "<b>One iteration</b>" in page


@pytest.mark.parametrize(
    "lines",
    [
        ["garbage", "[1]", "{}"],
        ['{"lane": 3, "what": null, "begin": 1, "end": 1, "iteration": 1}'],
        ['{"lane": "<b>", "what": "<i>", "begin": 0, "end": 2, "iteration": 1}'],
        ['{"lane": "trainer", "what": "update", "begin": 2, "end": 1, "iteration": 1}'],
        ['{"lane": "trainer", "what": "update", "begin": "x", "end": NaN, "iteration": 1}'],
        ['{"lane": "engine 0", "what": "writing", "begin": 0, "end": 1, "iteration": 1}'],
        [f'{{"lane": "engine {n}", "what": "writing", "begin": {n}, "end": 99, "iteration": 1}}' for n in range(40)],
    ],
)
def test_odd_time_lines_do_not_break_the_page(lines, tmp_path):
    folder = write_async_run(tmp_path / "run")
    (folder / "time_line.jsonl").write_text("\n".join(lines))
    page = page_of(folder)
    assert "<td><b></td>" not in page and "<td><i></td>" not in page


def test_covered_time_against_counting_every_moment():
    draw = random.Random(1)
    for _ in range(50):
        parts = [
            [
                TimeSpan("engine 0", "writing", begin := draw.randrange(50), begin + draw.randrange(9), 1)
                for _ in range(6)
            ]
            for _ in range(2)
        ]
        moments = [{m for span in part for m in range(int(span.begin), int(span.end))} for part in parts]
        first, second = map(covered, parts)
        assert length(first) == len(moments[0])
        assert length(common(first, second)) == length(common(second, first)) == len(moments[0] & moments[1])


def test_lanes_are_ordered_by_kind_and_number():
    names = ["rewards 0", "engine 10", "engine 2", "trainer", "other"]
    found = lanes_of(TimeSpan(name, "x", 0, 1, 1) for name in names)
    assert found == ["trainer", "engine 2", "engine 10", "rewards 0", "other"]


def test_spans_are_read_in_their_order(tmp_path):
    folder = write_async_run(tmp_path / "run")
    write_spans(folder, [("trainer", "update", begin) for begin in (3, 1, 2)])
    assert [span.begin for span in read_run(folder).spans] == [1, 2, 3]
