"""Episodes that are paused and go on: from drafts, in instances that wait for them, while a device draws."""

import pytest

from tests.envs.episodes import at_work, check_exact, from_disk, go_on, paused, plain, play, player, sampling_of
from tests.envs.fake_pool import Counting, Pool
from tests.rollout.answers import DoneAgain
from trimtab.envs.environment_pool import FailureReply
from trimtab.envs.types import Step, Task
from trimtab.rollout.builtin import cuda_graphs


class Breaking(Pool):
    """Whose processes end, now and then, while turns are drawn."""

    def poll(self, seconds):
        found = super().poll(seconds)
        if self.recording and (running := [n for n in self.instances if n not in {w[1] for w in self._waiting}]):
            self.broken += 1
            if self.broken % 4 == 0 and running[0] not in {reply.episode for reply in found}:
                del self.instances[running[0]]
                found.append(FailureReply(running[0], "its process was ended", innocent=True))
        return found


@pytest.mark.parametrize("slow", [0, 2])
def test_what_is_heard_while_a_device_draws_changes_nothing(policy, slow, monkeypatch):
    expected = [plain(r) for r in play(player(policy, Pool()), rows=3, n=3)]
    monkeypatch.setattr(cuda_graphs, "has_graphs", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "capture_graph", DoneAgain)
    pool = Breaking(slow=slow)
    pool.recording, pool.broken, inside = False, 0, []
    run = cuda_graphs.DecodeGraphs.run

    def watched(recorded, runner, samples, steps, meanwhile):
        def heard():
            pool.recording, before = True, len(pool._waiting)
            meanwhile()
            pool.recording = False
            inside.append(len(pool._waiting) != before)

        return run(recorded, runner, samples, steps, heard)

    monkeypatch.setattr(cuda_graphs.DecodeGraphs, "run", watched)
    engine = player(policy, pool)
    assert [plain(r) for r in play(engine, rows=3, n=3)] == expected
    assert any(inside) and pool.broken >= 4


@pytest.mark.short(7)
@pytest.mark.parametrize("way", ["suspended", "stored", "beside"])
@pytest.mark.parametrize("advances", [7, 15, 1, 11, 4])
def test_episodes_go_on_from_drafts_as_if_nothing_had_been(policy, advances, way):
    expected = {(r.prompt, r.sample): plain(r) for r in play(player(policy, Pool(slow=1)), n=2)}
    pool = Pool(slow=1)
    engine = player(policy, pool)
    session, finished = at_work(engine, advances)
    drafts = session.partials()
    if way == "beside":  # what another thread has seen, and the process is gone
        session.close()
        pool = Pool(slow=1)
        engine = player(policy, pool)
        drafts = from_disk(drafts)
    else:
        told = {row: [(d.sample, d.ids) for d in own] for row, own in drafts.items()}
        drafts = paused(session)
        assert {row: [(d.sample, d.ids) for d in own] for row, own in drafts.items()} == told
        if way == "stored":
            drafts = from_disk(drafts)
    made = len(pool.made)
    rollouts = finished + go_on(engine, drafts)
    assert {(r.prompt, r.sample): plain(r) for r in rollouts} == expected
    check_exact(policy, rollouts)
    assert all(r.episode.begun == 1 for r in rollouts)
    if way == "suspended" and advances >= 7:
        assert len(pool.made) == made, "nothing was played again"
    assert not pool.instances


def test_an_environment_that_answers_otherwise_is_begun_anew_and_counted(policy):
    class Fickle(Counting):
        made = 0

        def __init__(self):
            super().__init__()
            Fickle.made += 1
            self.own = Fickle.made

        def step(self, turn):
            step = super().step(turn)
            return Step(messages=f"{step.messages} {self.own}", reward=1.0, done=step.done)

    session, _ = at_work(player(policy, Pool(Fickle)), 9)
    drafts = from_disk(session.partials())
    session.close()
    answered = {(row, d.sample) for row, own in drafts.items() for d in own if d.episode and len(d.episode.said) > 1}
    rollouts = go_on(player(policy, Pool(Fickle)), drafts)
    assert answered and {(r.prompt, r.sample) for r in rollouts if r.episode.begun == 2} == answered
    check_exact(policy, rollouts)


def test_an_evaluation_in_between_leaves_paused_episodes_their_instances(policy):
    expected = {(r.prompt, r.sample): plain(r) for r in play(player(policy, Pool()), n=2)}
    pool = Pool()
    engine = player(policy, pool)
    session, finished = at_work(engine, 7)
    drafts = paused(session)
    waiting = set(pool.instances)
    play(engine, rows=2)
    assert waiting and not waiting & set(pool.dropped)
    made = len(pool.made)
    rollouts = finished + go_on(engine, drafts)
    assert len(pool.made) == made, "nothing was played again"
    assert {(r.prompt, r.sample): plain(r) for r in rollouts} == expected


def test_over_many_pauses_everybody_keeps_the_instance_that_he_had(policy):
    """Also where a record lies in memory where one lay that is over."""
    pool = Pool(lambda: Counting(6), slow=1)
    engine = player(policy, pool)
    drafts, finished, pauses = dict.fromkeys(range(6)), 0, 0
    while drafts and pauses < 60:  # who is played again at every pause never ends
        pauses += 1
        with engine.session(sampling_of(engine.tokenizer, n=4)) as session:
            asked = {
                session.add([5, 6, 7], seed=31 + row, task=Task(row, 0, 100 + row, "Hello"), partials=own): row
                for row, own in drafts.items()
            }
            drafts, found = {}, []
            for _ in range(4):
                found += session.step(3)
            session.abort()
            while session.has_unfinished:
                found += session.step()
        for rollout in found:
            if rollout.finish == "abort":
                drafts.setdefault(asked[rollout.prompt], []).append(rollout.stored())
            finished += rollout.finish != "abort"
        del found, rollout
    assert finished == len(pool.made) == 24, "nothing was played again"


def test_parked_instances_that_nobody_wants_are_given_up(policy):
    pool = Pool()
    engine = player(policy, pool)
    paused(at_work(engine, 7)[0])
    assert pool.instances
    go_on(engine, {})
    assert not pool.instances
    engine.close()
    assert pool.closed
