"""Streams: joined, they are the whole answer; no piece cuts a character or shows a stop string; who leaves ends it."""

import json
import random
import threading
import time
from dataclasses import replace

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.server.running import InThreads, Scripted, ScriptedSession, engine, running, tokenizer
from tests.server.test_faults import CHAT, COMPLETE, HELLO, until
from trimtab.envs.chat_tokens import MessageParser
from trimtab.rollout.trajectory import Trajectory
from trimtab.server.request_params import ServerDefaults
from trimtab.server.responses import AnswerStream
from trimtab.server.sessions import ServedPolicy


@pytest.fixture(scope="module")
def servers():
    with running(engine(5), processes=InThreads()) as several, running(engine(6)) as one:
        yield {"processes": several, "alone": one}


def events(reply):
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def joined(chunks):
    """The choices of a whole response, from chunks."""
    found = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        whole = found.setdefault(choice["index"], {"index": choice["index"], "logprobs": None, "finish_reason": None})
        assert whole["finish_reason"] is None, "nothing follows the end"
        message = whole.setdefault("message", {}) if "delta" in choice else whole
        for name, value in choice.get("delta", {"text": choice.get("text")}).items():
            message[name] = message[name] + value if name in message and name != "role" else value
        if (columns := choice.get("logprobs")) is not None:
            own = whole["logprobs"] = whole["logprobs"] or {}
            for name, values in columns.items():
                own[name] = values if values is None else own.get(name, []) + values
        if "token_ids" in choice:
            whole["token_ids"] = whole.get("token_ids", []) + choice["token_ids"]
        for name in ("finish_reason", "stop_reason"):
            whole[name] = choice.get(name)
    return [found[index] for index in sorted(found)]


def rounded(value):
    """In other company the last bits are others."""
    if isinstance(value, float):
        return round(value, 3) + 0.0
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return {name: rounded(one) for name, one in value.items()} if isinstance(value, dict) else value


LONG = {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
REQUESTS = {
    "chat": (CHAT, {"messages": HELLO, "max_tokens": 40}),
    "chats": (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "n": 3, **LONG}),
    "stops": (CHAT, {"messages": HELLO, "stop": ["e", "th"], "n": 4, **LONG}),
    "shown stops": (COMPLETE, {"prompt": "what", "stop": "e", "include_stop_str_in_output": True, **LONG}),
    "texts": (COMPLETE, {"prompt": [[5, 6, 7], [8]], "logprobs": 3, "n": 2, **LONG}),
    "special": (COMPLETE, {"prompt": "what", "skip_special_tokens": False, "n": 2, "max_tokens": 40}),
    "echo": (COMPLETE, {"prompt": ["what is", "the"], "echo": True, "logprobs": 2, "n": 2, "max_tokens": 20}),
    "scores": (COMPLETE, {"prompt": [[5, 6, 7], [8]], "echo": True, "logprobs": 2, "max_tokens": 0}),
}


@pytest.mark.parametrize("where", ["processes", "alone"])
@pytest.mark.parametrize("session", ["", "/s/a"])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_joined_stream_is_the_whole_answer(servers, where, session, name):
    path, body = REQUESTS[name]
    server, body = servers[where], {"seed": 5, **body}
    whole = server.post(session + path, body).json()
    chunks = events(server.post(session + path, body, stream=True, stream_options={"include_usage": True}))
    choices = whole["choices"]
    for choice in choices:
        choice.pop("prompt_token_ids", None)
    assert rounded(joined(chunks)) == rounded(choices)
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    if "max_tokens" in LONG.keys() & body.keys() and body.get("ignore_eos") and "stop" not in body:
        assert len([chunk for chunk in chunks if chunk["choices"]]) > 2 * len(choices), "in more than one piece"
    if path == CHAT:
        said = [delta for chunk in chunks for choice in chunk["choices"] if (delta := choice["delta"])]
        assert said[0] == {"role": "assistant", "content": ""}


@pytest.fixture
def slowly(servers, monkeypatch):
    for server in servers.values():
        step = server.server.queue.step
        monkeypatch.setattr(
            server.server.queue, "step", lambda session, step=step: (time.sleep(0.02), step(session, 4))
        )


def test_tokens_come_while_the_answer_is_drawn(servers, slowly):
    for where, server in servers.items():
        for session in (None, "b"):
            body = {"prompt": [5], "stream": True, "session_id": session, **LONG, "max_tokens": 40}
            with server.client.stream("POST", COMPLETE, json=body) as reply:
                lines = reply.iter_lines()
                first = json.loads(next(lines).removeprefix("data: "))
                assert server.server.queue.waiting == 1, where
                assert len(first["choices"][0]["token_ids"]) < 20
                assert list(lines)[-2] == "data: [DONE]"


@pytest.mark.parametrize("session", [None, "c"])
@pytest.mark.parametrize("where", ["processes", "alone"])
def test_a_client_that_leaves_ends_its_answer_and_its_memory_is_free(servers, slowly, where, session):
    server = servers[where]
    pool = engine(5 if where == "processes" else 6).memory.prefix_cache
    body = {"prompt": [5, 6], "stream": True, "session_id": session, **LONG, "n": 3, "max_tokens": 500}
    sampled = server.server.metrics.sampled_tokens
    with httpx.Client(base_url=server.url) as client, client.stream("POST", COMPLETE, json=body) as reply:
        next(reply.iter_lines())
        assert server.server.queue.waiting == 3
    until(lambda: not server.server.queue.waiting)
    assert server.server.metrics.sampled_tokens - sampled < 1500
    until(lambda: pool.pool.num_free + pool.num_evictable >= pool.pool.total - 1)
    assert session is None or server.client.get("/s/c/trace").json()["turns"] == [], "nothing is recorded of it"


def test_a_streamed_turn_is_recorded_and_gone_on_from(servers):
    for server in servers.values():
        (choice,) = joined(events(server.post(f"/s/d{CHAT}", messages=HELLO, seed=1, max_tokens=9, stream=True)))
        asked = [*HELLO, choice["message"], {"role": "user", "content": "and"}]
        events(server.post(f"/s/d{CHAT}", messages=asked, seed=1, max_tokens=9, stream=True))
        trace = server.client.get("/s/d/trace").json()
        assert trace["branches"] == [[0, 1]]
        assert trace["turns"][0]["versions"] == [0] * len(trace["turns"][0]["token_ids"])


def test_a_stream_that_was_begun_is_finished_before_the_server_ends():
    with running(engine(7), processes=InThreads(1)) as server:
        body = {"prompt": [5], "stream": True, **LONG, "max_tokens": 300}
        with server.client.stream("POST", COMPLETE, json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.server.stop()
            assert list(lines)[-2] == "data: [DONE]"


class HalfWay(Scripted):
    """Draws a few tokens, then fails until it is repaired; with the weights of another version, it draws others."""

    def __init__(self, *answers):
        super().__init__(lambda prompt: None)
        self.answers, self.failed = answers, threading.Event()

    def session(self, sampling):
        return HalfWaySession(self)


class HalfWaySession(ScriptedSession):
    def new_tokens(self, known):
        ids = np.array(tokenizer().encode(self.engine.answers[0])[:3], np.int32)
        return {
            number: Trajectory(number, 0, [], ids[first:], -np.ones(len(ids) - first, np.float32))
            for number, first in known.items()
            if first < len(ids)
        }

    def step(self, steps=None):
        if self.running and not self.engine.failed.is_set():
            if self.engine.answer("") is None:
                self.engine.answer = lambda prompt: ""
                return []
            self.engine.failed.set()
            if len(self.engine.answers) == 1:
                raise RuntimeError("a kernel fell over")
            self.engine.answer = lambda prompt: self.engine.answers[1]
        return super().step(steps)


@pytest.mark.parametrize("answers", [("abcdef",), ("abcdef", "xyz")])
def test_a_failure_half_way_is_the_last_event(answers):
    with running(HalfWay(*answers)) as server:
        reply = server.post(COMPLETE, prompt=[5], stream=True)
        lines = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n") if line]
        assert lines[0]["choices"][0]["text"] == "abc"
        assert lines[-1]["error"]["type"] == "server_error" and len(lines) == 2


# ---- pieces of text


def spelling_tokenizer():
    """Like SentencePiece's: words begin with a space, and what it does not know is spelled in bytes."""
    words = ["▁so", "▁", "a", "▁é", "é", "▁▁", "字"]
    names = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def some_ids(words, source):
    """Random tokens, and those of real characters cut at any place."""
    if source.random() < 0.5:
        return [source.randrange(len(words)) for _ in range(source.randrange(1, 30))]
    spelled = "".join(source.choices("aé字🙂 s", k=12)).encode()
    bytes_only = [words.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in spelled]
    return words.encode("".join(source.choices("aé字🙂 s", k=12))) if bytes_only[0] is None else bytes_only


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("words", [tokenizer(), spelling_tokenizer()], ids=["bytes", "spelling"])
def test_pieces_of_any_tokens_are_parts_of_the_whole_text(words, special):
    source, policy = random.Random(0), ServedPolicy("tiny", words, ServerDefaults((), len(words)), 64)
    for _ in range(300):
        ids, stops = some_ids(words, source), source.choice([[], ["a"], ["é字", "s a"]])
        whole, stream, sent = policy.text(ids, special=special), AnswerStream(policy, special=special), ""
        while len(stream.ids) < len(ids):
            new = ids[len(stream.ids) :][: source.randrange(1, 6)]
            stream.take(Trajectory(0, 0, [], new, np.zeros(len(new), np.float32)))
            sent += stream.delta({"content": stream.certain_text(stops)}).get("content", "")
            assert whole.startswith(sent) and not any(stop in sent for stop in stops)
            assert stops or not sent.endswith("�"), "it may be the beginning of a character"
        if not stops and words.convert_ids_to_tokens(ids[-1]) in ("a", "字", "Ġthe"):
            assert sent == whole, "all of it was certain"


def test_what_is_certain_of_a_message_is_part_of_the_whole_one():
    parts = ["<think>", "</think>", "so", " ", "\n", "<", "<tool_call>", "</tool_call>", '{"name": "f"}', "</thi"]
    source, parser = random.Random(0), MessageParser(tokenizer(), [{"function": {"name": "f"}}])
    streamed = set()
    for _ in range(3000):
        text = "".join(source.choices(parts, k=8))
        how = {"opened": source.random() < 0.5, "calls": source.random() < 0.5}
        whole = parser.hermes(text, **how)
        for end in range(len(text)):
            certain = parser.hermes(text[:end], **how, whole=False)
            for name in ("reasoning_content", "content"):
                assert (whole.get(name) or "").startswith(certain.get(name) or ""), (text, end)
                streamed |= {(name, how["calls"])} if certain.get(name) else set()
    assert len(streamed) == 4, "each kind was seen before its end"


def test_reasoning_and_calls_are_streamed_in_their_fields():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for text in (f"<think>so\n</think>\n\nfour {call}<|im_end|>", "<think>so far", "four"):
        with running(Scripted(lambda prompt, text=text: text)) as server:
            fields = {"tools": [{"type": "function", "function": {"name": "f"}}], "stop": ["zz"]}
            (whole,) = server.chat("2+2?", **fields)["choices"]
            (found,) = joined(events(server.post(CHAT, {"messages": HELLO, **fields}, stream=True)))
            for called in found["message"].get("tool_calls", []):
                assert called.pop("index") == 0
            assert found["message"].get("reasoning") == whole["message"].get("reasoning")
            assert found["message"]["content"] == (whole["message"]["content"] or "")
            assert found["message"].get("tool_calls") == whole["message"].get("tool_calls")
            assert found["finish_reason"] == whole["finish_reason"]


def test_an_answer_that_was_drawn_anew_otherwise_is_not_passed_off_as_the_same():
    words = tokenizer()
    stream = AnswerStream(ServedPolicy("tiny", words, ServerDefaults((), len(words)), 64), special=False)
    first = Trajectory(0, 0, [], [40, 41], np.zeros(2, np.float32))
    stream.take(first)
    with pytest.raises(Exception, match="begun anew"):
        stream.take(replace(first, tokens=np.array([40, 42, 43], np.int32), finish="stop"))
