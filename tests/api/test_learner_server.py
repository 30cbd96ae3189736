"""The policy over HTTP, on the weights that are learnt meanwhile."""

import json
import threading
import urllib.error
import urllib.request

import pytest

import trimtab
from tests.server import running
from trimtab.api.learner import Learner

ASKED = {"prompt": [5, 6, 7], "max_tokens": 40, "logprobs": 0, "return_token_ids": True, "seed": 3}


@pytest.fixture(scope="module")
def one():
    import copy

    return Learner(copy.deepcopy(running.plain_model()), tokenizer=running.tokenizer(), bf16=False, learning_rate=1e-2)


def ask(url: str, body: dict, path: str = "/completions", key: str = "any") -> dict:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]


def learn(one: Learner) -> None:
    samples = one.sample([[5, 6, 7]], 4, max_new_tokens=8)
    for number, sample in enumerate(samples):
        sample.advantages = float(number % 2) - 0.5
    one.forward_backward(samples, "reinforce")
    assert one.optim_step()["applied"]


def test_answers_come_from_the_weights_after_an_update(one):
    with one.serve() as url:
        before = ask(url, ASKED)
        learn(one)
        after = ask(url, ASKED)
        for answer in (before, after):
            ids = [5, 6, 7, *answer["token_ids"]]
            sample = trimtab.Sample(ids, [place >= 3 for place in range(len(ids))])
            answer["now"] = one.log_probs([sample])[0].tolist()
        assert after["now"] == pytest.approx(after["logprobs"]["token_logprobs"], abs=1e-5)
        assert before["now"] != pytest.approx(before["logprobs"]["token_logprobs"], abs=1e-3)
        chat = ask(url, {"messages": [{"role": "user", "content": "what"}], "max_tokens": 4}, "/chat/completions")
        assert isinstance(chat["message"]["content"], str)
    with pytest.raises(urllib.error.URLError):
        ask(url, ASKED)
    one.sample([[5]], max_new_tokens=2)  # the engine is the Learner's again


def test_requests_and_updates_at_once_all_come_to_an_end(one):
    answers = []
    with one.serve(token="secret") as url:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(url, ASKED, key="wrong")
        asking = [
            threading.Thread(target=lambda seed=seed: answers.append(ask(url, ASKED | {"seed": seed}, key="secret")))
            for seed in range(6)
        ]
        for thread in asking:
            thread.start()
        for _ in range(3):
            learn(one)
        for thread in asking:
            thread.join()
    assert len(answers) == 6 and all(answer["token_ids"] for answer in answers)


def test_a_port_that_is_taken_is_told(one):
    with one.serve() as url:
        port = int(url.split(":")[2].split("/")[0])
        with pytest.raises(trimtab.UserError, match="cannot listen there"), one.serve(port):
            pass
