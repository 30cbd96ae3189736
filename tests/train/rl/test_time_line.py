"""Spans against a clock of the test's own."""

import json
import threading

import pytest

from trimtab.errors import CannotWrite
from trimtab.train.rl import rollout_files
from trimtab.train.rl.rollout_files import Spans, TimeLine


class Clock:
    """time.monotonic of two machines, of which the second is far ahead."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rollout_files, "time", clock)
    return clock


def rows(folder) -> list[tuple]:
    lines = (folder / "time_line.jsonl").read_text().splitlines()
    return [tuple(json.loads(line).values()) for line in lines]


def test_spans_told_by_another_clock_lie_where_they_were(tmp_path, clock):
    line, engine = TimeLine(tmp_path), Spans()
    clock.now += 1000.0  # the engine's machine
    with engine.during("writing"):
        clock.now += 2.0
    with engine.during("judging"):
        clock.now += 1.0
    told = engine.taken()
    clock.now -= 1000.0  # the trainer's, at the same moment
    line.add_engines({0: told}, 1)
    with line.during("update", 1):
        clock.now += 0.5
    line.close()
    assert rows(tmp_path) == [
        ("engine 0", "writing", 0.0, 2.0, 1),
        ("rewards 0", "judging", 2.0, 3.0, 1),
        ("trainer", "update", 3.0, 3.5, 1),
    ]


def test_what_goes_on_is_told_in_parts_that_meet_and_overlapping_work_once(clock):
    engine = Spans()
    with engine.during("judging"):
        clock.now += 1.0
        with engine.during("judging"), engine.during("writing"):
            clock.now += 1.0
            assert engine.taken() == [("judging", 2.0, 0.0), ("writing", 1.0, 0.0)]
            clock.now += 1.0
        clock.now += 1.0
    assert sorted(engine.taken()) == [("judging", 2.0, 0.0), ("writing", 2.0, 1.0)]
    assert engine.taken() == []


def test_neighbours_are_one_span(clock):
    engine = Spans()
    for _ in range(3):
        with engine.during("writing"):
            clock.now += 1.0
        clock.now += 0.001
    clock.now += 1.0
    with engine.during("writing"):
        clock.now += 1.0
    assert [(what, round(began - ended, 3)) for what, began, ended in engine.taken()] == [
        ("writing", 3.002),
        ("writing", 1.0),
    ]


def test_an_error_ends_a_span_too(tmp_path, clock):
    line, engine = TimeLine(tmp_path), Spans()
    with pytest.raises(KeyError), line.during("update", 1), engine.during("writing"):
        clock.now += 1.0
        raise KeyError
    assert engine.taken() == [("writing", 1.0, 0.0)]
    assert rows(tmp_path) == [("trainer", "update", 0.0, 1.0, 1)]


def test_a_resumed_line_is_cut_back_and_its_clock_goes_on_from_there(tmp_path, clock):
    line = TimeLine(tmp_path)
    for iteration in (1, 2, 3):
        with line.during("update", iteration):
            clock.now += 1.0
    line.close()
    clock.now += 500.0
    line = TimeLine(tmp_path, resume_from=2)
    clock.now += 0.25
    with line.during("update", 3):
        clock.now += 1.0
    assert [row[2:] for row in rows(tmp_path)] == [(0.0, 1.0, 1), (1.0, 2.0, 2), (2.25, 3.25, 3)]


def test_without_a_folder_nothing_is_written_and_a_full_disk_is_said(tmp_path, clock):
    with TimeLine().during("update", 1):
        pass
    line = TimeLine(tmp_path)
    line._file._file = open("/dev/full", "w")  # noqa: SIM115 (closed with the line)
    with pytest.raises(CannotWrite, match="cannot write there"):
        line.add_engines({0: [("writing", 1.0, 0.0)]}, 1)
    line.close()


def test_threads_do_not_lose_spans():
    engine, told = Spans(), []
    threads = [threading.Thread(target=_work, args=(engine, f"kind {n}")) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        told += engine.taken()
    told += engine.taken()
    assert {what for what, _, _ in told} == {f"kind {n}" for n in range(4)}
    assert engine._running == {}


def _work(engine: Spans, what: str) -> None:
    for _ in range(200):
        with engine.during(what):
            pass
