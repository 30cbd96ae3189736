"""Every wrong request gets a clear 4xx in the clients' own form, and nobody else notices."""

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.server.running import CONTEXT, InThreads, Scripted, ScriptedSession, engine, running, tokenizer
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.engine import MAX_CHUNK_SECONDS, MAX_CHUNK_SIZE, MIN_CHUNK_SIZE, decode_chunk_size
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.server.request_queue import EngineFailed, PolicyMetrics, QueuedRequest, RequestQueue
from trimtab.server.sessions import SessionRecord, SessionStore

CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
HELLO = [{"role": "user", "content": "hm"}]
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def server():
    with running(engine(), max_bytes=200_000) as server:
        yield server


def said(content):
    return [{"role": "user", "content": content}]


def calling(function):
    return [{"role": "assistant", "tool_calls": [{"function": function}]}]


IMAGE = {"type": "image_url", "image_url": {"url": "a"}}
WRONG_OF_CHAT = {  # values of a field
    "messages": [None, "hm", [], ["hm"], [{"role": "nobody", "content": "hm"}], said(7), said("\ud800"), said([IMAGE])],
    "temperature": [-1, "hot", True, 10**400],
    "top_p": [1.5],
    "top_k": [0.5],
    "min_p": [-0.5],
    "max_tokens": [0, 1.5],
    "max_completion_tokens": [-1],
    "n": [0, 10**6],
    "seed": ["a", 2**64],
    "stop": [[""], 7],
    "stop_token_ids": [[10**6], ["a"]],
    "logprobs": [3],
    "top_logprobs": [1000],
    "logit_bias": [{"99999": 1}, {"9" * 5000: 1}],
    "presence_penalty": [1],
    "tools": [[{"name": "add"}], "add"],
    "response_format": [{"type": "json_object"}],
    "stream": [1, "true"],
    "stream_options": [1, {"include_usage": 1}],
    "echo": [True, "yes"],
    "chat_template_kwargs": [{"chat_template": "{{ 1 }}"}],
    "session_id": ["a" * 1000],
    "model": [7],
}
WRONG = [
    *((CHAT, {name: value}, name) for name, values in WRONG_OF_CHAT.items() for value in values),
    (CHAT, {"messages": calling({})}, "messages"),
    (CHAT, {"messages": calling({"name": "a", "arguments": "{"})}, "messages"),
    (CHAT, {"logit_bias": {"5": "a"}}, "logit_bias.5"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"continue_final_message": True}, "add_generation_prompt"),
    (COMPLETE, {}, "prompt"),
    *((COMPLETE, {"prompt": value}, "prompt") for value in ([], [[5], []], [5, "a"], [-1], [10**6], [True])),
    (COMPLETE, {"prompt": [5], "echo": "yes"}, "echo"),
    (COMPLETE, {"prompt": [5], "echo": True, "logprobs": 21}, "logprobs"),
    (COMPLETE, {"prompt": [5], "max_tokens": 0}, "max_tokens"),
    (COMPLETE, {"prompt": [5], "echo": True, "max_tokens": -1}, "max_tokens"),
    (COMPLETE, {"prompt": [5] * 513, "echo": True, "max_tokens": 0}, "prompt"),
    (COMPLETE, {"prompt": [5], "use_beam_search": True}, "use_beam_search"),
    (COMPLETE, {"prompt": [5], "stream": "yes"}, "stream"),
    (COMPLETE, {"prompt": [5] * 513, "stream": True}, "prompt"),
    (GENERATE, {}, "token_ids"),
    *((GENERATE, {"token_ids": value}, "token_ids") for value in ("a", [10**6])),
    (GENERATE, {"token_ids": [5], "sampling_params": 3}, "sampling_params"),
    (GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    (GENERATE, {"token_ids": [5], "features": {"image": 1}}, "features"),
    ("/v1/chat/completions/tokens", {"messages": HELLO}, "tokens"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
]


@pytest.mark.parametrize("path, body, param", WRONG)
def test_a_wrong_field_is_named(server, path, body, param):
    body = {"messages": HELLO, "max_tokens": 2, **body} if path == CHAT else body
    reply = server.client.post(path, content=json.dumps(body).encode())
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] in (param, f"{param}.include_usage") and len(error["message"]) > 10
    assert server.server.queue.waiting == 0


@pytest.mark.parametrize(
    "content, status",
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"[" * 50_000, 400),
        (b'{"a": "\xff"}', 400),
        (b'{"a":"' + b"a" * 300_000, 413),
    ],
)
def test_what_is_no_request_is_refused_in_the_same_form(server, content, status):
    reply = server.client.post(CHAT, content=content)
    assert reply.status_code == status and reply.json()["error"]["message"]


def test_unknown_models_places_and_ways_are_told(server):
    reply = server.post(CHAT, messages=HELLO, model="gpt-5")
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
    assert server.client.get("/nowhere").json()["error"]["code"] == "not_found"
    assert server.client.get(CHAT).status_code == 405
    for path in ("/v1/embeddings", "/v1/load_lora_adapter", "/pause", "/update_weights"):
        assert server.post(path).status_code == 501 and len(server.post(path).json()["error"]["message"]) > 20


def test_a_prompt_without_room_says_what_clients_look_for(server):
    long = "a b" * CONTEXT
    for path, body in (
        (CHAT, {"messages": said(long)}),
        (COMPLETE, {"prompt": [5] * CONTEXT}),
        (GENERATE, {"token_ids": [5] * CONTEXT, "sampling_params": {}}),
        (COMPLETE, {"prompt": "x" * 100_000}),
    ):
        reply = server.post(path, body)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
        assert reply.json()["error"]["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens")
    body = server.post(COMPLETE, prompt=[5] * (CONTEXT - 2), max_tokens=100, ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == 2, "what there is room for"


def test_without_a_chat_template_conversations_are_refused_with_the_way_out():
    with running(Scripted(lambda prompt: "x<|im_end|>"), template=None) as server:
        reply = server.post(CHAT, messages=HELLO)
        assert reply.status_code == 400 and "/v1/completions" in reply.json()["error"]["message"]


def test_the_token_is_asked_for_everywhere_but_at_the_health_page():
    with running(Scripted(lambda prompt: "x<|im_end|>"), token="secret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for path in (CHAT, COMPLETE, GENERATE, "/tokenize", "/s/a/v1/chat/completions"):
                reply = server.post(path, {"messages": HELLO}, headers)
                assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
            for path in ("/v1/models", "/metrics", "/s/a/trace"):
                assert server.client.get(path, headers=headers).status_code == 401
        assert server.client.get("/health").status_code == 200
        assert server.post(CHAT, {"messages": HELLO}, {"Authorization": "Bearer secret"}).status_code == 200


EVIL = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"]


@pytest.mark.parametrize("host", [*EVIL, "10.0.0.1", "[::2]", ""])
def test_without_a_token_only_this_machine_s_names_are_answered(server, host):
    """A page of another site whose name leads here since it was loaded (DNS rebinding) sends that name."""
    server.chat("hm", "/s/rebound/v1/chat/completions", max_tokens=1)
    for path in ("/s/rebound/trace", "/v1/models", "/metrics"):
        reply = server.client.get(path, headers={"host": host})
        assert reply.status_code == 421 and "127.0.0.1 or localhost" in reply.json()["error"]["message"]
    assert server.post(CHAT, {"messages": HELLO, "max_tokens": 1}, {"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "LocalHost:99", "127.0.0.1:8000", "127.0.0.2", "[::1]:7"])
def test_this_machine_s_names_are_answered_with_any_port(server, host):
    assert server.client.get("/v1/models", headers={"host": host}).status_code == 200


def test_with_a_token_a_proxy_may_call_the_server_by_any_name():
    with running(Scripted(lambda prompt: "x<|im_end|>"), token="secret") as server:
        headers = {"host": "models.example", "Authorization": "Bearer secret"}
        assert server.client.get("/v1/models", headers=headers).status_code == 200


def test_a_body_of_20_mb_gets_an_answer_that_its_client_reads(server):
    for headers in ({}, {"Expect": "100-continue"}):
        reply = server.client.post(CHAT, content=b"a" * 20_000_000, headers=headers)
        assert reply.status_code == 413 and "more than 200000 bytes" in reply.json()["error"]["message"]
    with pytest.raises(urllib.error.HTTPError) as refused:  # a client that sends everything before it reads anything
        urllib.request.urlopen(server.url + CHAT, data=b"a" * 20_000_000)
    assert refused.value.code == 413 and "more than 200000 bytes" in json.load(refused.value)["error"]["message"]
    assert server.client.get("/v1/models").status_code == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
@pytest.mark.parametrize("how", [[], ["-H", "Expect:"]])
def test_curl_reads_why_its_body_is_too_large(server, tmp_path, how):
    body = tmp_path / "body"
    body.write_bytes(b"a" * 20_000_000)
    command = ["curl", "-sS", *how, "--data-binary", f"@{body}", server.url + CHAT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "more than 200000 bytes" in json.loads(done.stdout)["error"]["message"]


PROCESSES = pytest.mark.parametrize("processes", [0, 2])  # of the HTTP side


def with_processes(engine, count, **how):
    return running(engine, processes=InThreads(count) if count else None, **how)


class Holding(Scripted):
    """Answers nothing until it is let go."""

    def __init__(self):
        super().__init__(lambda prompt: "x<|im_end|>" if self.leave.wait(0.01) else None)
        self.leave = threading.Event()


def posted(server, count):
    """So many requests, each in a thread, and all inside."""
    threads = ThreadPoolExecutor(count)
    found = [threads.submit(server.post, CHAT, messages=HELLO) for _ in range(count)]
    until(lambda: server.server.queue.waiting >= count)
    return found


def until(true):
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def statuses(posts):
    return [post.result(30).status_code for post in posts]


@PROCESSES
def test_beyond_the_limit_a_request_is_sent_away_and_may_try_again(processes):
    holding = Holding()
    with with_processes(holding, processes, max_waiting=3) as server:
        posts = posted(server, 3)
        late = server.post(CHAT, messages=HELLO)
        assert late.status_code == 503 and late.headers["retry-after"] == "1"
        assert late.json()["error"]["type"] == "overloaded_error" and late.json()["error"]["code"] == "overloaded"
        holding.leave.set()
        assert statuses(posts) == [200] * 3
        assert server.post(CHAT, messages=HELLO).status_code == 200


def test_of_a_request_that_is_sent_away_nothing_is_drawn():
    holding = Holding()
    with running(holding, max_waiting=3) as server:
        posts = posted(server, 2)
        late = server.post(COMPLETE, prompt=["a", "b"])
        assert late.status_code == 503
        until(lambda: server.server.queue.waiting == 2)
        many = server.post(COMPLETE, prompt=["a", "b"], n=2)
        assert many.status_code == 400 and "at most 3 answers" in many.json()["error"]["message"]
        holding.leave.set()
        assert statuses(posts) == [200] * 2


def test_what_was_set_down_is_drawn_whole_where_others_than_the_drawn_are_wanted():
    queue, own = RequestQueue(PolicyMetrics()), SamplingParams(max_new_tokens=12, top_log_probs=2)
    asks = [QueuedRequest([5, 6], 1, own), QueuedRequest([5, 6], 1, own)]
    with engine(2).session(SamplingParams()) as whole:
        queue.put(asks[0])
        while not asks[0].result.done():
            queue.step(whole)
    with engine(2).session(SamplingParams()) as first:
        queue.put(asks[1])
        queue.step(first, 4)
        queue.suspend(first)
    assert asks[1].partial is not None
    with engine(2).session(SamplingParams()) as second:
        while not asks[1].result.done():
            queue.step(second)
    expected, found = (ask.result.result() for ask in asks)
    assert found.ids == expected.ids and found.alternatives.tokens.shape == (12, 2)


def test_those_that_were_answered_together_are_read_as_they_return_and_drawn_together(monkeypatch):
    for name in ("SECONDS_OF_QUIET", "MOST_SECONDS_OF_QUIET"):
        monkeypatch.setattr(f"trimtab.server.request_queue.{name}", 60)
    queue, own = RequestQueue(PolicyMetrics()), SamplingParams(max_new_tokens=3)
    with engine(8).session(SamplingParams()) as session:
        queue.put(QueuedRequest([5], 1, own))
        queue.gather(session)  # nobody was answered yet
        queue.put(QueuedRequest([6], 1, own), QueuedRequest([7], 1, own))
        while queue.waiting:
            queue.step(session)
        queue.put(QueuedRequest([5], 1, own))
        coming = threading.Thread(target=lambda: [queue.put(QueuedRequest([6], 1, own)) for _ in range(2)])
        threading.Timer(0.05, coming.start).start()
        queue.gather(session)
        assert queue.waiting == 3 and set(session.output_lengths().values()) == {1}  # first tokens alone
        coming.join()
        queue.step(session, 1)
        queue.gather(session)  # they are at work
        assert queue.waiting == 3
        monkeypatch.setattr("trimtab.server.request_queue.MOST_SECONDS_OF_QUIET", 0.01)
        while queue.waiting:
            queue.step(session)
        queue.put(QueuedRequest([5], 1, own))
        queue.put(QueuedRequest([6], 1, own))
        queue.gather(session)  # the third has gone elsewhere
        assert queue.waiting == 2
        queue.close(EngineFailed("the end"))
        queue.gather(session)


def test_where_every_place_is_taken_or_steps_are_short_more_is_drawn_between_two_looks(monkeypatch):
    wait = "trimtab.rollout.engine.MAX_CHUNK_SECONDS"
    monkeypatch.setattr(wait, 0)
    queue, own = RequestQueue(PolicyMetrics()), SamplingParams(max_new_tokens=100, min_new_tokens=100)
    with BuiltinEngine(engine().policy, tokenizer(), max_num_seqs=2).session(SamplingParams()) as session:
        asked, advance = [], session.step
        session.step = lambda steps: asked.append(steps) or advance(steps)
        queue.put(QueuedRequest([5], 1, own))
        queue.step(session, 1)  # it begins
        for seconds in (0, 0, 60):
            monkeypatch.setattr(wait, seconds)
            queue.step(session)
        monkeypatch.setattr(wait, 0)
        queue.put(QueuedRequest([5], 1, own))
        queue.step(session, 1)
        queue.step(session)
    least, most = MIN_CHUNK_SIZE, MAX_CHUNK_SIZE
    assert asked == [1, least, least, most, 1, most] and least < most


def test_the_shorter_a_step_the_more_of_them_within_what_somebody_may_wait():
    between = (MIN_CHUNK_SIZE + MAX_CHUNK_SIZE) // 2
    seconds = (0.0, MAX_CHUNK_SECONDS / (between + 0.5), 60.0)
    assert [decode_chunk_size(None, seconds=one) for one in seconds] == [MAX_CHUNK_SIZE, between, MIN_CHUNK_SIZE]
    assert decode_chunk_size(None, full=True, seconds=60.0) == MAX_CHUNK_SIZE and decode_chunk_size(3, full=True) == 3


def test_what_has_finished_is_put_away_when_nobody_waits():
    queue, own = RequestQueue(PolicyMetrics()), SamplingParams(max_new_tokens=3)
    builtin = BuiltinEngine(engine().policy, tokenizer(), max_num_seqs=2)
    with builtin.session(SamplingParams()) as session:
        queue.put(QueuedRequest([5] * 40, 1, own))
        while queue.waiting:
            queue.step(session)
        assert builtin.memory.prefix_cache.lookup([5] * 41).tokens == 40


def test_those_who_wait_for_a_place_make_it_full():
    builtin = BuiltinEngine(engine().policy, tokenizer(), max_num_seqs=2)
    with builtin.session(SamplingParams(max_new_tokens=50)) as session:
        session.add([5])
        assert not session.full
        session.add([6], limit=1)
        session.add([7])
        assert session.full
        (first,) = session.step(4)
        assert first.prompt == 1 and session.full  # the third has not begun


@PROCESSES
def test_what_was_accepted_is_answered_before_the_server_ends(processes):
    holding = Holding()
    with with_processes(holding, processes) as server:
        posts = posted(server, 4)
        server.server.stop()
        if not processes:  # one of several may have closed the connection
            late = server.post(CHAT, messages=HELLO)
            assert late.status_code == 503 and late.json()["error"]["code"] == "closing"
            assert server.client.get("/health").status_code == 503
        holding.leave.set()
        assert statuses(posts) == [200] * 4


@PROCESSES
def test_what_takes_longer_than_the_limit_gets_a_503_and_the_server_ends(processes):
    with with_processes(Holding(), processes, drain_seconds=0.2) as server:
        posts = posted(server, 4)
        server.server.stop()
        assert statuses(posts) == [503] * 4


@pytest.mark.parametrize("processes, session", [(0, None), (1, None), (1, "a")])
def test_nothing_is_drawn_for_a_client_that_has_gone(processes, session):
    with with_processes(engine(2), processes) as server:
        place = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        body = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "session_id": session}
        body = json.dumps(body).encode()
        with socket.create_connection(place) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            until(lambda: server.server.queue.waiting)
        until(lambda: not server.server.queue.waiting)
        until(lambda: server.server.metrics.requests[COMPLETE, 499] == 1)
        assert server.server.metrics.sampled_tokens < 500


class Breaking(Scripted):
    """Falls over whenever a certain prompt is among those it draws for."""

    def session(self, sampling):
        return BreakingSession(self)


class BreakingSession(ScriptedSession):
    def step(self, steps=None):
        if any("poison" in tokenizer().decode(ids) for ids, _ in self.running.values()):
            raise RuntimeError("a kernel fell over")
        return super().step(steps)


def test_nobody_fails_for_the_request_of_another():
    together = threading.Barrier(5)
    with running(Breaking(lambda prompt: "x<|im_end|>")) as server:

        def ask(words):
            together.wait()
            return server.post(CHAT, messages=said(words))

        with ThreadPoolExecutor(5) as threads:
            replies = list(threads.map(ask, ("a", "b", "poison", "c", "d")))
        assert [reply.status_code for reply in replies] == [200, 200, 500, 200, 200]
        assert "a kernel fell over" in replies[2].json()["error"]["message"]
        assert server.post(CHAT, messages=HELLO).status_code == 200


@PROCESSES
def test_an_engine_that_cannot_begin_ends_the_server(processes):
    class Failing(Scripted):
        def session(self, sampling):
            raise RuntimeError("no memory")

    with with_processes(Failing(None), processes) as server:
        until(lambda: server.server.queue.closed)
        assert server.client.get("/health").status_code == 503
        reply = server.post(CHAT, messages=HELLO)
        assert reply.status_code == 500 and "no memory" in reply.json()["error"]["message"]


def grow(records, session, tokens):
    drawn = Trajectory(0, 0, [5, 6], [7] * tokens, np.zeros(tokens, np.float32), "stop")
    turn = records.get_or_create(session).add(drawn, None, {"role": "assistant", "content": ""}, ended=True)
    records.grown(session, turn)


def test_sessions_that_were_quiet_for_the_longest_are_forgotten_first():
    records = SessionStore(max_tokens=1000)
    for number in range(50):
        session = f"s{number}"
        grow(records, session, 50)
        records.get_or_create("s0")  # is asked for again and again
    assert 1 < len(records) < 10 and records.find("s0") is not None and records.find("s49") is not None
    assert records.held <= 1000
    kept = records.get_or_create("s0")
    records.drop("s0")
    records.grown("s0", kept.turns[0])
    assert records.held == sum(record.held for record in records._records.values())


def test_a_record_that_is_larger_than_all_may_be_is_forgotten():
    records = SessionStore(max_tokens=100)
    grow(records, "a", 200)
    assert len(records) == 0 and records.held == 0
    assert SessionRecord().turn_before_messages([b"a", b"b"]) is None
