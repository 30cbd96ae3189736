"""An agent's episodes are what the server drew for it, token by token."""

import contextlib
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch

from tests.server.agents import Agents
from tests.server.running import TEMPLATE, engine, plain_model, tokenizer
from trimtab.envs.environment_pool import EnvironmentPool, SandboxLimits
from trimtab.envs.types import EpisodeSettings, Task
from trimtab.rollout.sampling import SamplingParams
from trimtab.server.agents import AgentServerEngine
from trimtab.server.environment_factory import make_environment_engine

CLIENT = httpx.Client(timeout=60)
SAMPLING = SamplingParams(max_new_tokens=10, n=2, temperature=0.9, seed=1)


def asking(base_url, api_key, model, messages, **fields):
    headers = {"Authorization": f"Bearer {api_key}"}
    body = {"model": model, "messages": messages, **fields}
    reply = CLIENT.post(f"{base_url}/chat/completions", json=body, headers=headers)
    if reply.status_code != 200:
        raise RuntimeError(reply.text)
    return reply.json()["choices"][0]["message"]


def talkative(turns):
    def play(task, *address):
        messages = [{"role": "user", "content": f"{task.prompt} {task.row}"}]
        for number in range(turns):
            messages += [asking(*address, messages), {"role": "user", "content": f"and {number}"}]
        return float(task.sample)

    return play


@contextlib.contextmanager
def served(play, **settings):
    words = tokenizer()
    words.chat_template = TEMPLATE
    agents = Agents(play)
    found = AgentServerEngine(engine(3), agents, words, EpisodeSettings(**settings))
    try:
        yield found, agents
    finally:
        found.close()
        for thread in agents.threads:
            thread.join(30)
        assert agents.closed


def sampling():
    return replace(SAMPLING, stop_token_ids=(tokenizer().eos_token_id,))


def tasks(count):
    return [Task(row, 0, 7, "what is") for row in range(count)]


def one_episode(agents):
    (rollout,) = agents.generate([[5]], replace(sampling(), n=1), tasks=tasks(1))
    return rollout


def log_probs(rollout):
    """Those of the drawn tokens, in one pass of the model over the whole."""
    ids = torch.tensor([rollout.prompt_ids + rollout.ids])
    with torch.no_grad():
        logits = plain_model()(input_ids=ids).logits[0, :-1] / SAMPLING.temperature
    found = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()[len(rollout.prompt_ids) - 1 :]
    return found[rollout.drawn]


def test_episodes_are_what_was_drawn_with_the_log_probs_of_one_pass():
    with served(talkative(3)) as (agents, _):
        rollouts = agents.generate([[5, 6]] * 3, sampling(), seeds=[1, 2, 3], tasks=tasks(3))
        again = agents.generate([[5, 6]], sampling(), seeds=[2], tasks=tasks(3)[1:2])
    assert [(r.prompt, r.sample, r.branch) for r in rollouts] == [(p, s, 0) for p in range(3) for s in range(2)]
    for rollout in rollouts:
        assert rollout.finish == "stop" and rollout.episode.reward == float(rollout.sample)
        assert (
            tokenizer().decode(rollout.prompt_ids).startswith(f"<|im_start|>user\nwhat is {rollout.prompt}<|im_end|>")
        )
        np.testing.assert_allclose(rollout.log_probs, log_probs(rollout), atol=1e-5)
        turns = rollout.episode.turns
        assert len(turns) == 3 and rollout.episode.logs["turns"] == 3 and rollout.episode.logs["own"] == 1.0
        assert sum(turn.end - turn.start for turn in turns) == rollout.drawn.sum() == len(rollout.versions)
        for turn in turns:
            assert rollout.drawn[turn.start : turn.end].all()
        spoken = [said for said in rollout.episode.said if not said.drawn]
        assert [said.text for said in spoken] == ["and 0", "and 1"]
    # Company changes nothing.
    assert [r.ids for r in again] == [r.ids for r in rollouts[2:4]]


def test_each_turn_is_drawn_in_one_branch_alone():
    def play(task, *address):
        first = [{"role": "user", "content": "go"}]
        said = asking(*address, first)
        for words in ("left", "right"):
            asking(*address, [*first, said, {"role": "user", "content": words}])
        asking(*address, first)
        return 1.0

    with served(play) as (agents, _):
        rollouts = agents.generate([[5]], replace(sampling(), n=1), tasks=tasks(1))
    assert [rollout.branch for rollout in rollouts] == [0, 1, 2]
    assert len({id(rollout.episode) for rollout in rollouts}) == 1
    left, right, anew = rollouts
    turns = left.episode.turns
    assert [turn.branch for turn in turns] == [0, 0, 1, 2]
    shared = turns[0].end
    assert left.ids[:shared] == right.ids[:shared] and left.drawn[:shared].all() and not right.drawn[:shared].any()
    assert anew.ids != left.ids[: len(anew.ids)], "asked again, it draws another answer"
    for rollout in rollouts:
        assert len(rollout.log_probs) == rollout.drawn.sum() > 0
        np.testing.assert_allclose(rollout.log_probs, log_probs(rollout), atol=1e-5)


@pytest.mark.parametrize("giving_up", [True, False])
def test_who_has_had_its_turns_is_told_and_that_is_how_it_ends(giving_up):
    def play(task, *address):
        try:
            return talkative(9)(task, *address)
        except RuntimeError as error:
            assert "max_turns" in str(error) and "This model's maximum context length is" in str(error)
            if giving_up:
                raise
            return 0.5

    with served(play, max_turns=2) as (agents, _):
        rollout = one_episode(agents)
    assert rollout.finish == "turns" and len(rollout.episode.turns) == 2
    assert rollout.episode.reward == (0.0 if giving_up else 0.5)


def test_who_has_no_room_left_ends_by_that():
    with served(talkative(50), max_turns=50, episode_max_len=100) as (agents, _):
        rollout = one_episode(agents)
    assert rollout.finish == "context" and len(rollout.prompt_ids) + len(rollout.ids) <= 100


def test_who_fails_is_begun_anew_and_at_last_its_group_is_left_out():
    attempts = []

    def play(task, *address):
        asking(*address, [{"role": "user", "content": "go"}])
        attempts.append((task.row, task.sample))
        if task.row == 1 and task.sample == 0:
            raise RuntimeError("no such tool")
        if task.row == 0 and attempts.count((0, 1)) == 1 and task.sample == 1:
            raise RuntimeError("once")
        return 1.0

    with served(play, retries=1) as (agents, _):
        rollouts = agents.generate([[5], [5]], sampling(), tasks=tasks(2))
    good = [rollout for rollout in rollouts if rollout.prompt == 0]
    assert [rollout.finish for rollout in good] == ["stop", "stop"]
    assert [rollout.episode.begun for rollout in good] == [1, 2]
    bad = [rollout for rollout in rollouts if rollout.prompt == 1 and rollout.sample == 0]
    assert [rollout.finish for rollout in bad] == ["failed"] and bad[0].episode.problem == "no such tool"
    assert attempts.count((1, 0)) == 2 and not len(bad[0].tokens)


def test_an_agent_that_asks_for_nothing_has_failed():
    with served(lambda task, *address: 1.0, retries=0) as (agents, _):
        rollout = one_episode(agents)
    assert rollout.finish == "failed" and "without asking" in rollout.episode.problem


def pause(agents, sampling):
    """What an agent was handed that had begun when it was aborted."""
    with agents.session(sampling) as session:
        session.add([5], seed=2, task=tasks(1)[0])
        while not (drafts := [d for found in session.partials().values() for d in found if len(d.tokens)]):
            session.step()
        session.abort()
        handed = []
        while session.has_unfinished:
            handed += session.step()
    assert [rollout.finish for rollout in handed] == ["abort"] and len(drafts) == 1
    return handed[0]


def test_a_paused_agent_waits_and_goes_on_where_it_was():
    with served(talkative(6)) as (agents, pool):
        one = replace(sampling(), n=1)
        paused = pause(agents, one)
        agents.weights_changed(1)
        with agents.session(one) as session:
            session.add([5], seed=2, partials=[paused.stored()], task=tasks(1)[0])
            (rollout,) = list(session)
        assert len(pool.threads) == 1, "the same program"
        (whole,) = agents.generate([[5]], one, seeds=[2], tasks=tasks(1))
    assert rollout.ids == whole.ids and rollout.finish == "stop" and rollout.episode.begun == 1
    assert set(rollout.versions.tolist()) == {0, 1}


def test_an_evaluation_in_between_draws_nothing_of_a_paused_agent():
    with served(talkative(6)) as (agents, pool):
        one = replace(sampling(), n=1)
        paused = pause(agents, one)
        (measured,) = agents.generate([[5]], replace(one, temperature=0.0), seeds=[3], tasks=tasks(1))
        with agents.session(one) as session:
            session.add([5], seed=2, partials=[paused.stored()], task=tasks(1)[0])
            assert session.output_lengths()[0, 0] == len(paused.log_probs), "it has waited"
            (rollout,) = list(session)
        assert len(pool.threads) == 2, "the same program, and that of the evaluation"
        (whole,) = agents.generate([[5]], one, seeds=[2], tasks=tasks(1))
    assert rollout.ids == whole.ids and rollout.finish == "stop" and rollout.episode.begun == 1
    assert measured.finish == "stop" and measured.ids != whole.ids


def test_from_a_record_that_nobody_waits_behind_it_begins_anew_and_says_so():
    with served(talkative(2)) as (agents, _):
        one = replace(sampling(), n=1)
        (rollout,) = agents.generate([[5]], one, seeds=[2], tasks=tasks(1))
        draft = replace(rollout.stored(), finish=None)
        with agents.session(one) as session:
            session.add([5], seed=2, partials=[draft], task=tasks(1)[0])
            (again,) = list(session)
    assert again.ids == rollout.ids and again.episode.begun == 2


FILE = """
import httpx


async def run(task, *, base_url, api_key, model):
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=60) as client:
        messages = [{"role": "user", "content": f"{task.prompt} {task.columns['number']}"}]
        for _ in range(2):
            reply = await client.post(f"{base_url}/chat/completions", json={"model": model, "messages": messages})
            reply.raise_for_status()
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "and"}]
    return {"reward": float(task.label), "own": 3.0}
"""


def test_an_agent_of_a_file_plays_in_a_process_of_its_own(tmp_path):
    (tmp_path / "agent.py").write_text(FILE)
    words = tokenizer()
    words.chat_template = TEMPLATE
    played = make_environment_engine(
        engine(3), EnvironmentPool(str(tmp_path / "agent.py"), SandboxLimits(workers=1)), words
    )
    given = [Task(row, 0, 7, "what is", label=row / 2, columns={"number": row}) for row in range(4)]
    try:
        rollouts = played.generate([[5]] * 4, sampling(), tasks=given)
    finally:
        played.close()
    assert [rollout.episode.reward for rollout in rollouts] == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5]
    for rollout in rollouts:
        assert rollout.finish == "stop" and len(rollout.episode.turns) == 2 and rollout.episode.logs["own"] == 3.0
        assert f"what is {rollout.prompt}" in words.decode(rollout.prompt_ids)
        np.testing.assert_allclose(rollout.log_probs, log_probs(rollout), atol=1e-5)


def test_nobody_else_is_answered():
    with served(talkative(1)) as (agents, _):
        agents.generate([[5]], sampling(), tasks=tasks(1))
        url, right = agents._url, {"Authorization": f"Bearer {agents._token}"}
        body = {"messages": [{"role": "user", "content": "hm"}]}
        assert CLIENT.post(f"{url}/v1/chat/completions", json=body).status_code == 401
        for path in ("/v1/chat/completions", "/s/nobody/v1/chat/completions"):
            assert CLIENT.post(url + path, json=body, headers=right).status_code == 404
        assert len(agents.server.sessions) == 0


@pytest.mark.parametrize("raises", [False, True])
def test_who_was_refused_and_went_on_has_not_ended_by_that(raises):
    def play(task, *address):
        with pytest.raises(RuntimeError, match="context_length_exceeded"):
            asking(*address, [{"role": "user", "content": "x" * 2000}])
        asking(*address, [{"role": "user", "content": "go"}])
        if raises:
            raise RuntimeError("no such tool")
        return 1.0

    with served(play, retries=0) as (agents, _):
        rollout = one_episode(agents)
    assert rollout.finish == ("failed" if raises else "stop")
    assert rollout.episode.problem == ("no such tool" if raises else None)
