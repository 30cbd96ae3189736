"""The server answers everybody with their own scores, and every wrong request with a clear 4xx."""

import asyncio
import contextlib
import json
import logging
import math
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.rewards.running import running
from tests.rewards.samples import Lengths, make_reward_request
from trimtab.rewards.client import RemoteReward
from trimtab.rewards.types import BadSample, RewardFailed, RewardResult
from trimtab.rewards.verifiers import make_verifier
from trimtab.server import http


class Numbers:
    """The number that a response is; a batch with a bad one fails as a whole."""

    name = "numbers"
    concurrent = True

    def __init__(self):
        self.batches = []

    def __call__(self, request):
        self.batches.append(len(request))
        if "bad" in request.responses:
            raise BadSample("a bad sample")
        if "broken" in request.responses:
            raise RewardFailed("the model broke")
        if "mistake" in request.responses:
            raise KeyError("a secret detail")
        return RewardResult([float(response) for response in request.responses])

    def close(self):
        pass


CLIENT = httpx.Client(timeout=30)


def openrlhf(*responses: str) -> dict:
    return {"query": [f"p{r}" for r in responses], "prompts": ["p"] * len(responses), "labels": [None] * len(responses)}


@pytest.fixture(scope="module")
def server():
    with running(Numbers(), max_bytes=100_000) as server:
        yield server


async def load(url: str, clients: int, requests: int) -> tuple[int, int]:
    """Clients that each send their share in both protocols; how many answers came, and how many were wrong."""
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def talk(number: int) -> tuple[int, int]:
            numbers, wrong = random.Random(number), 0
            for turn in range(requests // clients):
                values = [float(numbers.randrange(10**6)) for _ in range(numbers.randrange(1, 5))]
                texts = [str(value) for value in values]
                if turn % 2:
                    reply = await client.post("/get_reward", json=openrlhf(*texts))
                    found = reply.json()["rewards"]
                else:
                    body = {"src": ["p"] * len(texts), "tgt": [""] * len(texts), "response": texts}
                    found = (await client.post("/", json=body)).json()["score"]
                wrong += found != values
            return requests // clients, wrong

        counts = await asyncio.gather(*map(talk, range(clients)))
    return sum(answered for answered, _ in counts), sum(wrong for _, wrong in counts)


@pytest.mark.parametrize("clients, requests", [(8, 400), pytest.param(32, 10_016, marks=pytest.mark.long)])
def test_no_answer_is_wrong_lost_or_swapped_under_load(clients, requests):
    reward = Numbers()
    with running(reward, max_samples=16) as server:
        assert asyncio.run(load(server.url, clients, requests)) == (requests, 0)
    assert max(reward.batches) > 4, "requests of several clients share batches"
    assert max(reward.batches) <= 16


def test_our_own_client_and_server_agree_in_both_protocols_and_on_scores_and_logs():
    request = make_reward_request(["abc", "d", ""], prompts=["p", "", "qq"])
    with running(Lengths()) as server:
        both = ("/get_reward", "openrlhf", [4.0, 1.0, 2.0]), ("/", "paddlenlp", [3.0, 1.0, 0.0])
        for path, protocol, scores in both:
            client = RemoteReward([server.url + path])
            result = client(request)
            assert result.rewards == [3.0, 1.0, 0.0] and result.scores == scores
            assert client.addresses[0].protocol.name == protocol
            client.close()
    with running(make_verifier("gsm8k:1.0,format:0.5")) as server:
        client = RemoteReward([server.url + "/get_reward"])
        assert client(make_reward_request(["7"], ["7"])).logs == {"gsm8k": [1.0], "format": [0.0]}
        client.close()


GOOD = json.dumps(openrlhf("1", "2")).encode()
DEEP = b"[" * 50_000
WRONG = {
    "nothing": (b"", 400),
    "half": (GOOD[:-1], 400),
    "not JSON": (b"query=1", 400),
    "not UTF-8": (b'{"query": ["\xff\xfe"]}', 400),
    "deep": (DEEP, 400),
    "a huge number": (b'{"query": ' + b"9" * 5000 + b"}", 400),
    "a list": (b"[]", 422),
    "null": (b"null", 422),
    "no fields": (b"{}", 422),
    "wrong fields": (b'{"text": ["a"]}', 422),
    "query is text": (b'{"query": "a"}', 422),
    "query is null": (b'{"query": null}', 422),
    "query of numbers": (b'{"query": [1, 2]}', 422),
    "query of lists": (b'{"query": [["a"]]}', 422),
    "prompts too short": (b'{"query": ["a", "b"], "prompts": ["a"]}', 422),
    "labels are text": (b'{"query": ["a"], "labels": "a"}', 422),
    "half a surrogate": (b'{"query": ["\\ud800"]}', 422),
    "no response": (b'{"src": ["a"], "tgt": ["b"]}', 422),
    "tgt too long": (b'{"src": ["a"], "tgt": ["b", "c"], "response": ["d"]}', 422),
    "tgt of numbers": (b'{"src": ["a"], "tgt": [1], "response": ["d"]}', 422),
    "oversize": (b'{"query": ["' + b"a" * 200_000 + b'"]}', 413),
}


@pytest.mark.parametrize("path", ["/", "/get_reward"])
@pytest.mark.parametrize("body, status", WRONG.values(), ids=WRONG)
def test_a_wrong_request_gets_a_clear_4xx_and_the_server_lives(server, path, body, status):
    reply = CLIENT.post(server.url + path, content=body)
    assert reply.status_code == status
    message = reply.json().get("error") or reply.json()["error_msg"]
    assert len(message) > 20 and "Traceback" not in message
    assert CLIENT.post(server.url + "/get_reward", content=GOOD).json()["rewards"] == [1.0, 2.0]


def test_random_bytes_and_broken_requests_of_every_length_leave_the_server_alive(server):
    numbers = random.Random(0)
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for _ in range(150):
            body = bytearray(GOOD if numbers.random() < 0.7 else numbers.randbytes(60))
            for _ in range(numbers.randrange(1, 6)):
                body[numbers.randrange(len(body))] = numbers.randrange(256)
            path = numbers.choice(["/", "/get_reward"])
            reply = client.post(path, content=bytes(body[: numbers.randrange(len(body) + 1)]))
            # A changed digit may leave the request good, and a changed text one that this reward cannot read.
            assert reply.status_code in (200, 400, 422, 500)
        assert client.post("/get_reward", content=GOOD).json()["rewards"] == [1.0, 2.0]


def test_wrong_paths_and_methods_are_4xx(server):
    assert CLIENT.post(server.url + "/nowhere", content=GOOD).status_code == 404
    assert CLIENT.get(server.url + "/get_reward").status_code == 405
    assert CLIENT.put(server.url + "/", content=GOOD).status_code == 405


def test_broken_connections_leave_the_server_alive(server):
    for sent in (b"", b"POST /get", b"POST / HTTP/1.1\r\nContent-Length: 500\r\n\r\n{", b"\x00\xff\r\n\r\n"):
        with server.connect() as connection:
            connection.sendall(sent)
    assert CLIENT.post(server.url + "/get_reward", content=GOOD).json()["rewards"] == [1.0, 2.0]


def test_a_request_without_a_length_is_bounded_too(server):
    def endless():
        for _ in range(10_000):
            yield b"a" * 1000

    assert CLIENT.post(server.url + "/", content=endless()).status_code == 413
    assert CLIENT.post(server.url + "/get_reward", content=GOOD).json()["rewards"] == [1.0, 2.0]


def test_a_reward_server_without_a_token_answers_to_this_machine_s_names_only(server):
    for host, status in (("localhost:7", 200), ("evil.example", 421), ("127.0.0.1.evil.example", 421)):
        for method, path in (("POST", "/get_reward"), ("GET", "/metrics")):
            content = GOOD if method == "POST" else None
            reply = CLIENT.request(method, server.url + path, content=content, headers={"host": host})
            assert reply.status_code == status, (host, path)


def test_a_client_that_sends_far_too_much_reads_why_it_was_refused(server):
    reply = CLIENT.post(server.url + "/get_reward", content=b"a" * 20_000_000)
    assert reply.status_code == 413 and "more than 100000 bytes" in reply.text
    with pytest.raises(urllib.error.HTTPError) as refused:  # a client that sends everything before it reads anything
        urllib.request.urlopen(server.url + "/get_reward", data=b"a" * 20_000_000)
    assert refused.value.code == 413 and b"more than 100000 bytes" in refused.value.read()


def test_a_client_that_never_stops_sending_is_hung_up_on(server, monkeypatch):
    monkeypatch.setattr(http, "MOST_DISCARDED", 1_000_000)
    with server.connect(timeout=20) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999999999\r\n\r\n")
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(b"a" * 100_000)
    assert CLIENT.post(server.url + "/get_reward", content=GOOD).json()["rewards"] == [1.0, 2.0]


def test_a_token_is_asked_for_everywhere_but_at_the_health_page():
    with running(Numbers(), token="a secret") as server:
        for headers in ({}, *({"Authorization": value} for value in ("Bearer wrong", "Bearer", "a secre"))):
            assert CLIENT.post(server.url + "/get_reward", content=GOOD, headers=headers).status_code == 401
            assert CLIENT.post(server.url + "/", content=GOOD, headers=headers).status_code == 401
            assert CLIENT.get(server.url + "/metrics", headers=headers).status_code == 401
        right = {"Authorization": "Bearer a secret"}
        assert CLIENT.post(server.url + "/get_reward", content=GOOD, headers=right).json()["rewards"] == [1.0, 2.0]
        assert CLIENT.get(server.url + "/metrics", headers=right).status_code == 200
        health = {"status": "ok", "reward": "numbers", "protocols": ["openrlhf", "paddlenlp"]}
        assert CLIENT.get(server.url + "/health").json() == health


def test_nobody_fails_for_the_samples_of_another(server):
    with httpx.Client(base_url=server.url) as client:

        async def ask() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url) as several:
                texts = ["1", "bad", "2", "broken", "3", "mistake", "4"]
                return await asyncio.gather(*(several.post("/get_reward", json=openrlhf(text)) for text in texts))

        replies = asyncio.run(ask())
        assert [reply.status_code for reply in replies] == [200, 422, 200, 500, 200, 500, 200]
        assert [replies[i].json()["rewards"] for i in (0, 2, 4, 6)] == [[1.0], [2.0], [3.0], [4.0]]
        assert replies[1].json() == {"error": "a bad sample"} and replies[3].json() == {"error": "the model broke"}
        assert "secret" not in replies[5].text
        reply = client.post("/", json={"src": ["a"], "tgt": ["b"], "response": ["bad"]})
        assert reply.json() == {"error_code": 422, "error_msg": "a bad sample", "score": []}


def test_the_metrics_page_counts_requests_by_status_and_samples():
    with running(Numbers()) as server:
        CLIENT.post(server.url + "/get_reward", content=GOOD)
        CLIENT.post(server.url + "/", content=b"{}")
        lines = CLIENT.get(server.url + "/metrics").text.splitlines()
    assert {
        'trimtab_reward_requests_total{status="200"} 1',
        'trimtab_reward_requests_total{status="422"} 1',
        "trimtab_reward_samples_total 2",
        "trimtab_reward_waiting_samples 0",
    } <= set(lines)


def test_figures_that_json_does_not_know_are_left_out():
    class Logging(Numbers):
        def __call__(self, request):
            return RewardResult([1.0, 2.0], logs={"good": [1.0, 2.0], "bad": [1.0, math.nan]})

    with running(Logging()) as server:
        reply = CLIENT.post(server.url + "/get_reward", content=GOOD)
    assert reply.json() == {"rewards": [1.0, 2.0], "scores": [1.0, 2.0], "extra_logs": {"good": [1.0, 2.0]}}


def test_no_samples_get_no_scores(server):
    assert CLIENT.post(server.url + "/get_reward", json={"query": []}).json()["rewards"] == []


class Slow(Numbers):
    """Holds every batch until it is let go."""

    def __init__(self):
        super().__init__()
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self, request):
        self.entered.set()
        assert self.leave.wait(30)
        return super().__call__(request)


@contextlib.contextmanager
def asking(server, reward, count):
    """So many requests, of which the first is being scored; their replies are in the list at the end."""
    replies = []
    with ThreadPoolExecutor(count) as threads:
        posts = [threads.submit(CLIENT.post, server.url + "/get_reward", content=GOOD) for _ in range(count)]
        assert reward.entered.wait(30)
        while server.server.gate.inside < count:
            time.sleep(0.01)
        yield replies
        replies += [post.result(30) for post in posts]


def test_what_was_accepted_is_answered_before_the_server_ends_and_what_comes_later_is_sent_away():
    reward = Slow()
    with running(reward) as server:
        with asking(server, reward, 4) as replies:
            server.stop()
            late = CLIENT.post(server.url + "/get_reward", content=GOOD)
            assert late.status_code == 503 and "about to end" in late.text
            assert CLIENT.get(server.url + "/health").status_code == 503
            reward.leave.set()
        assert [reply.json()["rewards"] for reply in replies] == [[1.0, 2.0]] * 4


def test_what_takes_longer_than_the_limit_gets_a_503_and_the_server_ends():
    reward = Slow()
    with running(reward, drain_seconds=0.3) as server:
        began = time.monotonic()
        with asking(server, reward, 4) as replies:
            server.stop()
        assert [reply.status_code for reply in replies] == [503] * 4
        server.thread.join(5)
        assert not server.thread.is_alive() and time.monotonic() - began < 4.0
    reward.leave.set()


# ---- strangers


def closed(connection, seconds=5.0):
    """What the server says on a connection before it closes it."""
    connection.settimeout(seconds)
    said = b""
    while piece := connection.recv(1000):
        said += piece
    return said


def test_headers_that_never_end_hold_no_connection(monkeypatch):
    monkeypatch.setattr(http, "HEADER_SECONDS", 0.3)
    with running(Numbers()) as server:
        silent, halves, dripping = ([server.connect() for _ in range(20)] for _ in range(3))
        kept = server.connect()
        request = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        kept.sendall(request)
        assert kept.recv(1000).startswith(b"HTTP/1.1 200")
        kept.sendall(request[:20])  # of a second request on the connection
        for connection in halves + dripping:
            connection.sendall(b"POST / HTTP/1.1\r\n")
        for _ in range(4):
            time.sleep(0.05)
            for connection in dripping:
                connection.sendall(b"A: b\r\n")
        for connection in [*silent, *halves, *dripping, kept]:
            assert b"HTTP/1.1 408" in closed(connection)
        assert CLIENT.get(server.url + "/health").status_code == 200


def test_a_body_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(http, "BODY_SECONDS", 0.3)
    with running(Numbers()) as server:
        connection = server.connect()
        connection.sendall(b"POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        said = closed(connection)
    assert said.startswith(b"HTTP/1.1 408") and b"not whole after 0.3 s" in said


def test_more_connections_than_may_be_are_sent_away(monkeypatch):
    monkeypatch.setattr(http, "MOST_CONNECTIONS", 5)
    with running(Numbers()) as server:
        while not server.server.started:
            time.sleep(0.01)
        first = [server.connect() for _ in range(5)]
        assert closed(server.connect()).startswith(b"HTTP/1.1 503")
        for connection in first:
            connection.close()
        while server.server.server_state.connections:
            time.sleep(0.01)
        assert CLIENT.get(server.url + "/health").status_code == 200


def test_a_log_has_few_lines_and_counts_the_rest(caplog, monkeypatch):
    logger = logging.getLogger("a server's")
    http.rate_limit_logs(logger.name)
    http.rate_limit_logs(logger.name)
    for number in range(1000):
        logger.error("trouble %d", number)
    assert len(caplog.records) == http.LOG_LINES
    monkeypatch.setattr(http, "LOG_SECONDS", 0.0)
    logger.error("more")
    assert caplog.records[-1].getMessage() == "more (after 980 lines left out)"


def test_at_the_limit_of_descriptors_the_server_lives_and_its_log_stays_short():
    words = [sys.executable, "-m", "trimtab.cli.serve_rm", "--reward_verifier", "gsm8k", "--port", "0"]
    words = ["bash", "-c", f"ulimit -n 100; exec {shlex.join(words)}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[-1]
            place = ("127.0.0.1", int(url.rpartition(":")[2]))
            many = [socket.create_connection(place) for _ in range(300)]
            time.sleep(1.0)
            for connection in many:
                connection.close()
            client = RemoteReward([url + "/get_reward"], pause=0.1)
            assert client(make_reward_request(["7"], ["7"])).rewards == [1.0]
            client.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0 and len(process.stderr.read()) < 40_000
        finally:
            process.kill()


def test_the_command_serves_and_ends_well_when_told_to():
    words = [sys.executable, "-m", "trimtab.cli.serve_rm", "--reward_verifier", "gsm8k", "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving gsm8k at http://127.0.0.1:")
        body = {"query": ["q: 7", "q: 8"], "prompts": ["q: ", "q: "], "labels": ["7", "7"]}
        assert CLIENT.post(line.split()[-1] + "/get_reward", json=body).json()["rewards"] == [1.0, 0.0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 and process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()
