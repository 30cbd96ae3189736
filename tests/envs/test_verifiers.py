"""Environments written for verifiers, of the generation that is installed, play at an endpoint of OpenAI's kind."""

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.envs.playing import task
from tests.json_server import answering
from trimtab.envs.loader import load
from trimtab.errors import UserError

pytestmark = pytest.mark.long

CLASSIC = """
import verifiers as vf
from datasets import Dataset

class Talk(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="Again.")]
    @vf.stop
    async def enough(self, state):
        return len(state["trajectory"]) >= self.rounds

def load_environment(rounds=3):
    async def said(completion, answer):
        return float(answer in completion[-1]["content"])
    async def talked(completion):
        return len(completion)
    rows = [{"question": f"Say {number}.", "answer": str(number)} for number in range(5)]
    talk = Talk(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[said, talked], weights=[2.0, 0.0]))
    talk.rounds = rounds
    return talk
"""

TASKSET = """
import verifiers.v1 as vf
__all__ = ["Says", "Talk"]

class Data(vf.TaskData):
    answer: str = ""

class Say(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def said(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.branches[-1].messages[-1].content or ""))
    @vf.metric
    async def talked(self, trace: vf.Trace) -> float:
        return len(trace.branches[-1].messages) - 1

class Config(vf.TasksetConfig):
    rounds: int = 3

class Says(vf.Taskset[Say, Config]):
    def load(self):
        for number in range(5):
            yield Say(Data(prompt=f"Say {number}.", answer=str(number)), self.config.task)

class Talk(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            for said in (None, *["Again."] * (self.taskset.config.rounds - 1)):
                if (await (talk.turn() if said is None else talk.turn(said))).terminated:
                    return
"""

FULL = {
    "message": "This model's maximum context length is 9 tokens",
    "code": "context_length_exceeded",
    "type": "",
    "param": "",
}


class Endpoint:
    """Says 3 whatever is asked, in conversations of at most so many messages."""

    def __init__(self) -> None:
        self.longest, self.says, self.url, self.asked = 99, "I say 3.", "", []

    def reply(self, body: dict[str, Any], request: BaseHTTPRequestHandler) -> tuple[int, dict[str, Any]]:
        self.asked.append((request.path, request.headers["authorization"], body["messages"]))
        if len(body["messages"]) > self.longest:
            return 400, {"error": FULL}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": self.says}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        about = {"id": "one", "object": "chat.completion", "created": 1, "model": body["model"]}
        return 200, {**about, "choices": [choice], "usage": usage}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()
    with answering(found.reply, with_request=True) as found.url:
        yield found


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("verifiers")
    classic = importlib.util.find_spec("verifiers.envs") is not None
    name = f"talk_{tmp_path.name.replace('-', '_')}.py"  # modules are remembered by their name
    (tmp_path / name).write_text(CLASSIC if classic else TASKSET)
    return f"verifiers:{tmp_path / name}"


def played(source: str, endpoint: Endpoint) -> list[tuple[float, dict[str, float]]]:
    loaded = load(source)
    assert loaded.info.kind == "agent" and loaded.rows is not None and loaded.run is not None
    rows = loaded.rows(9, 1)
    assert sorted(row["prompt"][0]["content"] for row in rows) == [f"Say {number}." for number in range(5)]
    rows = json.loads(json.dumps(rows))
    rows.sort(key=lambda row: row["prompt"][0]["content"])

    async def all_of_them() -> list[Any]:
        runs = []
        for place, row in enumerate(rows):
            columns = {name: value for name, value in row.items() if name not in ("prompt", "label")}
            one = task(row=place, prompt=row["prompt"], label=row.get("label"), columns=columns)
            runs.append(loaded.run(one, base_url=f"{endpoint.url}/s/{place}/v1", api_key="key", model="policy"))
        return await asyncio.gather(*runs)

    return asyncio.run(all_of_them())


def test_episodes_are_played_at_the_endpoint_of_each(source: str, endpoint: Endpoint) -> None:
    found = played(f"{source}?rounds=2", endpoint)
    assert [reward for reward, _ in found] == [0.0, 0.0, 0.0, 2.0, 0.0]
    assert all(logs["talked"] == 3.0 for _, logs in found)
    assert len(endpoint.asked) == 10
    for place in range(5):
        mine = [messages for path, key, messages in endpoint.asked if path == f"/s/{place}/v1/chat/completions"]
        assert [len(messages) for messages in mine] == [1, 3]
        said = [message["content"] for message in mine[-1]]
        assert said == [f"Say {place}.", "I say 3.", "Again."]
    assert {key for _, key, _ in endpoint.asked} == {"Bearer key"}


def test_a_conversation_that_is_full_is_judged_as_it_stands(source: str, endpoint: Endpoint) -> None:
    endpoint.longest = 3
    found = played(source, endpoint)
    assert [reward for reward, _ in found] == [0.0, 0.0, 0.0, 2.0, 0.0]
    assert all(logs["talked"] == 3.0 for _, logs in found)


def test_a_policy_that_says_nothing_is_judged_by_that(source: str, endpoint: Endpoint) -> None:
    endpoint.says = ""
    assert [reward for reward, _ in played(source, endpoint)] == [0.0] * 5


def test_an_endpoint_that_fails_is_no_reward(source: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FULL, "message", "no")
    monkeypatch.setitem(FULL, "code", "bad_request")
    endpoint.longest = 0
    with pytest.raises(RuntimeError, match="verifiers: "):
        played(source, endpoint)


@pytest.mark.parametrize("place", ["no_such_module_at_all", "none.py"])
def test_what_is_not_there_is_refused(place: str) -> None:
    pytest.importorskip("verifiers")
    with pytest.raises(UserError, match="--environment verifiers:"):
        load(f"verifiers:{place}")
