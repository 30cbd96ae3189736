"""Episodes of a Learner: named environments in their processes, classes in this one."""

import json
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import trimtab
from trimtab.api.learner import Learner
from trimtab.embedded import guess_game
from trimtab.embedded.guess_game import Guess, rows

HERE = {"max_new_tokens": 4}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("game")
    guess_game.write(folder, train_rows=1, test_rows=1)
    return Learner(folder / "model", bf16=False, learning_rate=1e-2)


class Echo:
    """Async, and with a reward at the end."""

    async def reset(self, task):
        self.turns = 0
        return task.prompt

    async def step(self, turn):
        self.turns += 1
        return trimtab.Step("higher", reward=float(turn.text == "4"), done=self.turns == 2, logs={"turns": 1.0})

    async def close(self):
        pass


class Broken(Echo):
    async def step(self, turn):
        raise ValueError("out of order")


class Slow(Guess):
    def step(self, turn):
        import time

        time.sleep(2)


def agent(task, *, base_url, api_key, model):
    """One that asks for its turns itself."""
    said = [{"role": "user", "content": task.prompt}]
    body = {"model": model, "messages": said, "max_tokens": 4}
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        answer = json.load(reply)["choices"][0]["message"]["content"]
    return float(len(answer))


def check(one, episodes):
    samples = [sample for episode in episodes for sample in episode.samples]
    for sample, found in zip(samples, one.log_probs(samples)):
        np.testing.assert_allclose(found, sample.log_probs, rtol=0, atol=1e-5)
    for episode in episodes:
        (sample,) = episode.samples
        turns = [said for said in episode.said if said.drawn]
        places = [sample.prompt_length + place for said in turns for place in range(said.start, said.end)]
        assert np.flatnonzero(sample.trained).tolist() == places and sample.reward == episode.reward


def test_a_named_environment_is_played_and_learnt_from(one):
    episodes = one.play("trimtab:guess", tasks=3, n=4, **HERE)
    assert [episode.task.row for episode in episodes] == [0] * 4 + [1] * 4 + [2] * 4
    assert {episode.reward for episode in episodes} <= {0.0, 1.0} and len(episodes[0].messages) > 1
    check(one, episodes)
    for episode, advantage in zip(episodes, trimtab.advantages([e.reward for e in episodes], 4, "rloo")):
        episode.samples[0].advantages = advantage
    one.forward_backward([episode.samples[0] for episode in episodes])
    assert one.optim_step()["applied"]


def test_a_class_is_played_in_this_process_and_says_the_same(one):
    tasks = rows(3, 1)
    one._draws = 50
    here = one.play(Guess, tasks, 2, **HERE)
    one._draws = 50
    apart = one.play("trimtab:guess", tasks, 2, **HERE)
    assert [e.samples[0].ids for e in here] == [e.samples[0].ids for e in apart]
    assert [e.reward for e in here] == [e.reward for e in apart]


def test_other_shapes_tasks_and_rewards(one):
    episodes = one.play(Echo, [trimtab.Task(7, 0, 1, guess_game.OPENING), guess_game.OPENING], **HERE)
    assert [episode.task.row for episode in episodes] == [7, 1]
    assert all(sum(said.drawn for said in episode.said) == 2 for episode in episodes)
    assert [e.reward for e in episodes] == [sum(s.reward for s in e.said if s.drawn) for e in episodes]
    check(one, episodes)


def test_an_agent_asks_the_learner_itself(one):
    episodes = one.play(agent, [guess_game.OPENING], 2)
    assert len(episodes) == 2 and all(episode.reward == len(episode.said[-1].text) for episode in episodes)
    check(one, episodes)


def test_what_fails_has_its_words_and_no_score(one):
    (episode,) = one.play(Broken, [guess_game.OPENING], env_retries=0, **HERE)
    assert episode.reward is None and episode.finish == "failed" and "out of order" in episode.problem
    (episode,) = one.play(Slow, [guess_game.OPENING], env_retries=0, env_timeout=0.2, **HERE)
    assert episode.reward is None and "took longer than 0.2 s" in episode.problem
    left = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    assert all(thread.daemon for thread in left)  # none that this process would wait for at its end


@pytest.mark.parametrize(
    "words, environment, tasks, limits",
    [
        ("none that is known", "gemm:x", 1, {}),
        ("nowhere.py", "nowhere.py", 1, {}),
        ("unknown|no such|there is no", "trimtab:gess", 1, {}),
        ("is no environment", int, 1, {}),
        ("give a class or a function", 3, 1, {}),
        ("tasks is 0", "trimtab:guess", 0, {}),
        ("tasks is empty", Guess, [], {}),
        ("tasks is one task", Guess, "go", {}),
        (r"tasks\[0\] is of type int", Guess, [1], {}),
        ("tasks is of type NoneType", Guess, None, {}),
        ("nowhere.py does not exist", Path("nowhere.py"), 1, {}),
        ("max_turns: takes a whole number, not 'many'", Guess, 1, {"max_turns": "many"}),
        ("max_turns is 0", "trimtab:guess", 1, {"max_turns": 0}),
    ],
)
def test_a_mistake_is_told_and_the_next_call_works(one, words, environment, tasks, limits):
    with pytest.raises(trimtab.Error, match=words):
        one.play(environment, tasks, **limits)
    one.sample(["higher"], max_new_tokens=1)
