"""The time-line of a run whose answers outlive an update: what it says, what it draws, and what it forgives."""

import json
import random
import re

import pytest

from tests.report.pages import Checked, write_async_run, write_metrics, write_rl_run
from trimtab.report.findings import findings
from trimtab.report.page import write_report
from trimtab.report.run_data import RunData, TimeSpan, read_run
from trimtab.report.time_line import common, covered, lanes_of, length


def page_of(folder) -> str:
    page = write_report(folder).read_text()
    Checked(page)
    assert not re.search(r'="[^"]*\b(nan|inf)\b', page), "a coordinate is not a number"
    return page.replace("\u00a0", " ")


def test_the_page_says_how_old_answers_were_and_what_overlapped(tmp_path):
    page = page_of(write_async_run(tmp_path / "run"))
    assert (
        "What was trained had been begun 1.1 updates earlier on average, 4 at most (4 would be allowed). Of the time "
        "in which the trainer learnt, engines wrote for 70 % and rewards were being judged for 20 %. Of an iteration, "
        "the trainer had nothing to do for 25 %." in page
    )
    assert "<dt>mean age in updates</dt><dd>1.1</dd><dd>at most 4; bound: 4</dd>" in page
    titles = re.findall(r"<figcaption><b>(.*?)</b>", page)
    assert {
        "Age of what is trained",
        "Trainer with nothing to do",
        "Engines at work",
        "Groups under way",
        "Tokens read again",
        "Corrected tokens",
    } <= set(titles)
    assert "Nothing unusual" in page
    assert "<td>engine 1</td><td>writing</td><td>an engine draws tokens</td><td>1 min 50 s</td><td>69 %</td>" in page


def test_the_picture_shows_a_few_iterations_lane_by_lane(tmp_path):
    page = page_of(write_async_run(tmp_path / "run"))
    picture = page.split("<b>Who did what, and when</b>")[1].split("</figure>")[0]
    assert "iterations 18 to 22; seconds since the run began" in picture
    assert re.findall(r"<span style=\"top:[^>]*>(.*?)</span>", picture) == [
        "trainer",
        "engine 0",
        "engine 1",
        "rewards 0",
    ]
    assert len(re.findall("<rect", picture)) == 5 * (4 + 2 + 2)
    assert "<title>trainer: update 2.5 s, iteration 20</title>" in picture
    starts = [float(x) for x in re.findall(r' x="([^"]*)"', picture)]
    assert min(starts) >= 0 and max(starts) <= 1000


def test_an_engine_where_the_policy_is_takes_turns_with_it(tmp_path):
    folder = write_async_run(tmp_path / "run")
    turns = (("trainer", "rollout", 0), ("engine 0", "writing", 0), ("trainer", "update", 1))
    rows = [{"lane": lane, "what": what, "begin": begin, "end": begin + 1, "iteration": 1}
            for lane, what, begin in turns]  # fmt: skip
    (folder / "time_line.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
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
    assert lanes_of(TimeSpan(name, "x", 0, 1, 1) for name in names) == [
        "trainer",
        "engine 2",
        "engine 10",
        "rewards 0",
        "other",
    ]


def run_of(folder, **figures: float) -> RunData:
    (folder / "config.json").write_text("{}")
    rows = [{"step": step, "tokens": 100, **figures} for step in range(1, 31)]
    return RunData(folder, rows=rows, job="grpo")


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"age_max": 0, "waiting": 0.1}, "without --async_train the run would have learnt from answers as new"),
        ({"age_max": 2, "waiting": 0.7}, "the trainer had nothing to do for 70\u00a0% of the time"),
        ({"age_max": 2, "waiting": 0.1, "read_again": 75}, "For every token that was trained 0.75 were read again"),
    ],
)
def test_what_only_the_end_shows_is_said(figures, words, tmp_path):
    (told,) = findings(run_of(tmp_path, **figures))
    assert words in told


def test_a_run_that_gains_from_it_is_not_warned_about(tmp_path):
    assert findings(run_of(tmp_path, age_max=3, waiting=0.3, read_again=20)) == []


def test_spans_are_read_in_their_order(tmp_path):
    folder = write_async_run(tmp_path / "run")
    rows = [{"lane": "trainer", "what": "update", "begin": b, "end": b + 1, "iteration": 1} for b in (3, 1, 2)]
    (folder / "time_line.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [span.begin for span in read_run(folder).spans] == [1, 2, 3]
