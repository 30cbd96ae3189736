"""The thread that writes while the policy learns: it gives the engine away when asked, and loses nothing."""

import random
import threading
import time

import pytest

from tests.train.rl.scripted_engine import ScriptedEngine, length_of
from tests.train.rl.test_async_worker import DRAWN, Judge, Words, admission
from trimtab.errors import RunFailed
from trimtab.rewards.types import RewardFailed
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.rl.async_worker import ThreadedRolloutWorker
from trimtab.train.update import InsufficientMemory

LONG = SamplingParams(max_new_tokens=400, n=3)
SOON = 20.0  # seconds within which a thread gets its turn, on any machine


@pytest.fixture
def beside():
    made = []

    def make(engine, judge=None, stopped=lambda: False, *, told=True):
        judges = [] if judge is None else [(judge, 1.0)]
        made.append((engine, ThreadedRolloutWorker(engine, judges, Words(), stopped)))
        if told:
            made[-1][1].resume()
        return made[-1][1]

    yield make
    for engine, role in made:
        if engine.stuck is not None:
            engine.stuck.set()
        role.close()
    assert not any(thread.name == "writing" for thread in threading.enumerate())


def until(holds):
    deadline = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("drained", [False, True], ids=["in_flight", "drained"])
@pytest.mark.parametrize("seed", range(3))
def test_every_group_is_handed_over_once_and_whole_while_weights_come(beside, drained, seed):
    rng, engine = random.Random(seed), ScriptedEngine(max_num_seqs=4, seconds=0.0002)
    role = beside(engine, Judge())
    found, admitted, drawn = {}, 0, 0
    while len(found) < 40:
        count = min(rng.randint(0, 6), 40 - admitted)
        role.admit(admission(range(admitted, admitted + count), version=engine.version), sampling=DRAWN)
        admitted += count
        done = role.collect(seconds=rng.choice([0.0, 0.01, None]))
        drawn += done.drawn
        for written in done.finished:
            assert written.place not in found
            found[written.place] = written.experience
        assert {group.place for group in role.unfinished()} == set(range(admitted)) - set(found)
        if rng.random() < 0.7:
            assert role.pause(drained=drained)
            role.weights_changed(version=engine.version + 1)  # which the engine refuses while it is at work
            at_rest = role.unfinished()
            role.resume()
            if drained:  # answers have ended, or have not begun
                assert all(draft.finish or not draft.ids for group in at_rest for draft in group.trajectories)
    assert engine.version > 3
    several = 0
    for place, experience in found.items():
        lengths = [length_of(place, sample, 30) for sample in range(3)]
        assert experience.lengths_S.tolist() == lengths
        assert experience.versions_N.tolist() == experience.sampled_N.tolist()
        several += sum(len(part.unique()) > 1 for part in experience.versions_N.split(lengths))
    assert (several == 0) == drained
    assert drawn == sum(int(experience.lengths_S.sum()) for experience in found.values())


def test_it_writes_while_nobody_asks_and_not_after_a_pause(beside):
    engine = ScriptedEngine(max_num_seqs=1, seconds=0.0001)
    role = beside(engine)
    role.admit(admission(range(3)), sampling=DRAWN)
    until(lambda: len(role._scorer._scored) == 3)
    assert role.pause() and role.pause() and engine.at_work is None
    role.admit(admission([7]), sampling=DRAWN)
    time.sleep(0.05)
    assert engine.at_work is None
    done = role.collect()
    assert [written.place for written in done.finished] == [0, 1, 2] and done.seconds > 0
    assert role.collect(seconds=0.02).finished == []
    role.resume()
    assert [written.place for written in role.collect().finished] == [7]
    assert role.collect().finished == []  # at once: nothing is under way


def test_nothing_is_written_before_it_is_told_to_go_on(beside):
    engine = ScriptedEngine(max_num_seqs=4)
    role = beside(engine, told=False)
    role.admit(admission([1]), sampling=DRAWN)
    assert role.collect(seconds=0.05).drawn == 0
    role.weights_changed(version=3)  # which the engine refuses while it is at work
    role.resume()
    (written,) = role.collect().finished
    assert set(written.experience.versions_N.tolist()) == {3}


def test_at_the_end_the_session_is_closed(beside):
    engine = ScriptedEngine(max_num_seqs=4, seconds=0.002)
    role = beside(engine)
    role.admit(admission([1, 2]), sampling=LONG)
    until(lambda: any(wait.tokens for wait in role.waits()))
    role.close()
    assert engine.at_work is None


def test_drained_it_begins_nothing_new_and_ends_what_it_has_begun(beside):
    engine = ScriptedEngine(max_num_seqs=6, seconds=0.002)
    role = beside(engine)
    role.admit(admission(range(20)), sampling=SamplingParams(max_new_tokens=60, n=3))
    until(lambda: any(wait.tokens for wait in role.waits()))
    assert role.pause(drained=True)
    begun = {group.place for group in role.unfinished() if not group.trajectories}
    assert begun and max(begun) == 19 and min(begun) <= 6  # those that were in the six places, and their neighbours
    role.resume()
    found = set()
    while len(found) < 20:
        found |= {written.place for written in role.collect().finished}


def test_a_drain_that_takes_too_long_is_reported_and_can_be_cut_short(beside):
    engine = ScriptedEngine(max_num_seqs=60, seconds=0.01)
    role = beside(engine)
    role.admit(admission([1]), sampling=SamplingParams(max_new_tokens=100_000, n=3))
    until(lambda: any(wait.tokens for wait in role.waits()))
    assert not role.pause(drained=True, seconds=0.05)
    assert role.pause() and engine.at_work is None
    (group,) = role.unfinished()
    assert group.trajectories and not any(draft.finish for draft in group.trajectories)


def test_of_an_engine_that_hangs_it_is_known_what_every_answer_has_and_waits_for(beside):
    engine = ScriptedEngine(max_num_seqs=5, seconds=0.0001)
    role = beside(engine, Judge(slow=(0,)))
    role.admit(admission([0]), sampling=LONG)
    until(lambda: {wait.what for wait in role.waits()} == {"its reward"})
    role.admit(admission([1, 2]), sampling=LONG)
    until(lambda: any(wait.place == 1 and wait.tokens > 2 for wait in role.waits()))
    engine.stuck = threading.Event()
    until(lambda: engine.hangs)
    assert not role.pause(seconds=0.05)
    role.admit(admission([3]), sampling=LONG)
    waits = role.waits()
    kinds = {(wait.place, wait.what) for wait in waits}
    assert {(0, "its reward"), (1, "its next token"), (3, "a place in the engine")} <= kinds
    groups = {group.place: group for group in role.unfinished()}
    assert list(groups) == [0, 1, 2, 3] and not groups[3].trajectories
    for wait in waits:
        drafts = groups[wait.place].trajectories
        assert wait.tokens == (len(drafts[wait.sample].ids) if drafts else 0)
    assert role.collect(seconds=0.02).finished == []


def test_what_fails_in_the_thread_is_raised_where_something_is_asked(beside):
    engine = ScriptedEngine()
    engine.fails = RunFailed("EngineDead")
    role = beside(engine)
    role.admit(admission([1]), sampling=DRAWN)
    for ask in (role.collect, role.pause):
        with pytest.raises(RunFailed, match="EngineDead"):
            ask()


def test_a_lack_of_memory_is_handed_back_and_leaves_the_engine_free(beside):
    engine = ScriptedEngine(max_num_seqs=3, seconds=0.001)
    role = beside(engine)
    role.admit(admission([1, 2]), sampling=DRAWN)
    until(lambda: any(wait.tokens for wait in role.waits()))
    engine.fails = RuntimeError("CUDA out of memory")
    done = role.collect()
    while not isinstance(done, InsufficientMemory):
        done = role.collect()
    assert role.pause() and engine.at_work is None
    assert any(draft.ids for group in role.unfinished() for draft in group.trajectories)


def test_a_failed_reward_and_a_request_to_stop_are_told_at_once(beside):
    told = threading.Event()
    role = beside(ScriptedEngine(max_num_seqs=3, seconds=0.01), Judge(broken=(1,)), told.is_set)
    role.admit(admission([1]), sampling=DRAWN)
    assert isinstance(role.collect(), RewardFailed)
    other = beside(ScriptedEngine(max_num_seqs=3, seconds=0.05), None, told.is_set)
    other.admit(admission([1]), sampling=DRAWN)
    threading.Timer(0.1, told.set).start()
    assert other.collect() is None
    assert other.pause() and [group.place for group in other.unfinished()] == [1]
