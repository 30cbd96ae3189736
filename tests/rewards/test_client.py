"""The client against servers that fail in every way, and then recover or do not."""

import itertools
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from tests.rewards.samples import make_reward_request
from trimtab.errors import UserError
from trimtab.rewards.client import RemoteReward
from trimtab.rewards.types import RewardFailed
from trimtab.sandbox import process as waiting
from trimtab.sandbox.process import RunStopped, Waiter

RESPONSES = [str(number) for number in range(10)]
EXPECTED = [float(number) for number in range(10)]


class Scripted(ThreadingHTTPServer):
    """Answers with its script's next fault, one a request, and rightly when there is none left."""

    daemon_threads = True

    def __init__(self, faults=(), protocol="openrlhf"):
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults, self.protocol = iter(faults), protocol
        self.bodies, self.headers = [], []
        self.released = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        path = "/get_reward" if self.protocol == "openrlhf" else ""
        return f"http://127.0.0.1:{self.server_port}{path}"

    def handle_error(self, request, client_address):
        pass  # clients that went away are part of the script


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        content = self.rfile.read(int(self.headers["Content-Length"]))
        server.bodies.append(content)
        server.headers.append(dict(self.headers))
        body = json.loads(content)
        if server.protocol == "openrlhf":
            texts, reply = body.get("query"), lambda scores: {"rewards": scores}
        else:
            texts = body.get("response")
            reply = lambda scores: {"error_code": 0, "error_msg": "Success", "score": scores}  # noqa: E731
        if texts is None:
            return self.send(500 if server.protocol == "openrlhf" else 422, b"what?")
        scores = [float(text.split()[-1]) for text in texts]
        match fault := next(server.faults, None):
            case None:
                self.send(200, json.dumps(reply(scores)).encode())
            case int():
                self.send(fault, b"no")
            case "slow":
                server.released.wait(30)
            case "close":
                self.connection.close()
            case "malformed":
                self.send(200, b'{"rewards": [1, 2')
            case "error":  # what PaddleNLP's server answers when scoring fails: zeros, and status 200
                self.send(200, json.dumps({"error_code": 7, "error_msg": "out of paper", "score": [0] * 10}).encode())
            case "deep":
                self.send(200, b'{"rewards": ' + b"[" * 100_000)
            case "huge log":
                self.send(200, json.dumps(reply(scores) | {"extra_logs": {"a": 10**400}}).encode())
            case "few" | "null" | "nan" | "text" | "huge":
                wrong = {
                    **{"few": scores[:-1], "null": None, "nan": [math.nan, *scores[1:]]},
                    **{"text": [str(score) for score in scores], "huge": [10**400, *scores[1:]]},
                }
                self.send(200, json.dumps(reply(wrong[fault])).encode())
            case "dripping headers":
                self.drip(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n")
            case "dripping body":
                self.drip(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" ")
            case "continuing":
                self.drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n")
            case "cut":
                self.send(200, b'{"rewards":', length=1000)

    def drip(self, first, drop):
        """The connection is never silent, and the reply never whole."""
        self.connection.sendall(first)
        while not self.server.released.wait(0.01):
            self.connection.sendall(drop)

    def send(self, status, content, length=None):
        self.send_response(status)
        self.send_header("Content-Length", str(length or len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(*faults, **how):
        servers.append(Scripted(*faults, **how))
        return servers[-1]

    yield start
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def ask():
    clients = []

    def score(*urls, request=None, **how):
        how = {"pause": 0.001, "timeout": 5.0, **how}
        clients.append(RemoteReward(list(urls), **how))
        return clients[-1](make_reward_request(RESPONSES) if request is None else request)

    yield score
    for client in clients:
        client.close()


FAULTS = ["slow", 500, 503, 429, "malformed", "few", "null", "nan", "text", "close", "cut", "deep", "huge"]
OF_PADDLENLP = [500, "malformed", "close", "few", "null", "nan", "error"]
DRIPPING = ["dripping headers", "dripping body", "continuing"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_recovers_is_asked_again_and_its_scores_are_right(serve, ask, fault):
    server = serve([fault, fault])
    result = ask(server.url, timeout=0.3 if fault == "slow" else 5.0, protocol="openrlhf")
    assert result.rewards == EXPECTED and len(server.bodies) == 3


def test_all_faults_in_a_row_are_outlived(serve, ask):
    assert ask(serve(FAULTS).url, attempts=len(FAULTS) + 1, timeout=0.3, protocol="openrlhf").rewards == EXPECTED


@pytest.mark.parametrize(
    "fault, words",
    [
        ("slow", "timed out, no whole reply in 0.2 s"),
        *((fault, "timed out, no whole reply in 0.2 s") for fault in DRIPPING),
        ("deep", "not JSON of rewards"),
        ("huge", "reward of row 0 is too large for a number"),
        (500, "HTTP status 500 'no'"),
        ("malformed", "a reply that is not JSON"),
        ("few", "reward: 9 for 10 samples"),
        ("nan", "reward of row 0 is nan"),
        ("text", "reward of row 0 is str '0.0'"),
        ("close", "disconnected|closed|reset"),
    ],
)
def test_a_server_that_never_recovers_is_a_named_error(serve, ask, fault, words):
    server = serve(itertools.repeat(fault))
    began = time.monotonic()
    with pytest.raises(RewardFailed, match=rf"no reward for rows 0 to 9 after 3 attempts; .*{server.url}: .*({words})"):
        ask(server.url, attempts=3, timeout=0.2 if fault == "slow" or fault in DRIPPING else 5.0, protocol="openrlhf")
    assert len(server.bodies) == 3 and time.monotonic() - began < 3.0


def test_a_figure_that_is_too_large_stops_nobody(serve, ask):
    assert ask(serve(["huge log"]).url, protocol="openrlhf").logs == {"a": [math.inf] * 10}


@pytest.mark.parametrize("fault", ["slow", *DRIPPING])
def test_a_run_that_is_told_to_stop_waits_no_longer(serve, fault):
    server, stop = serve(itertools.repeat(fault)), threading.Event()
    client = RemoteReward([server.url], waiter=Waiter(stop.is_set))
    threading.Timer(0.2, stop.set).start()
    began = time.monotonic()
    with pytest.raises(RunStopped):
        client(make_reward_request(RESPONSES))
    client.close()
    assert time.monotonic() - began < 1.5


def test_a_long_wait_is_told_with_what_is_waited_for_and_how_long_it_may_take(serve, ask, capsys, monkeypatch):
    monkeypatch.setattr(waiting, "PATIENCE", 0.1)
    server = serve(["slow", "slow"])
    ask(server.url, timeout=0.3, attempts=3, protocol="openrlhf")
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        f"waiting for 0 s now: what {server.url} answers for 10 samples; given up after 1 s at the latest"
    )
    assert 2 <= len(told) <= 3, "twice as long before it is told again"


def test_nobody_there_is_a_named_error(ask):
    with pytest.raises(RewardFailed, match=r"after 2 attempts; .*http://127.0.0.1:9/get_reward: .*[Rr]efused"):
        ask("http://127.0.0.1:9/get_reward", attempts=2)


@pytest.mark.parametrize("status", [401, 404, 413])
def test_what_asking_again_cannot_mend_is_not_asked_again(serve, ask, status):
    server = serve(itertools.repeat(status))
    with pytest.raises(RewardFailed, match=rf"after 1 attempt; .*HTTP status {status}"):
        ask(server.url, protocol="openrlhf")
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "fault, words",
    [
        ("error", "error 7: out of paper"),
        ("few", "score: 9 for 10 samples"),
        ("null", "score"),
        ("nan", "score of row 0 is nan"),
        (500, "HTTP status 500 'no'"),
        ("close", "disconnected|closed|reset"),
    ],
)
def test_a_fault_of_a_paddlenlp_server_that_stays_stops_the_run_with_its_name(serve, ask, fault, words):
    with pytest.raises(RewardFailed, match=words):
        ask(serve(itertools.repeat(fault), protocol="paddlenlp").url, attempts=2, protocol="paddlenlp")


@pytest.mark.parametrize("protocol", ["openrlhf", "paddlenlp"])
@pytest.mark.parametrize("path", ["", "/get_reward"])
def test_the_protocol_is_found_out_whatever_the_address_looks_like(serve, ask, protocol, path):
    server = serve(protocol=protocol)
    url = server.url.removesuffix("/get_reward") + path
    assert ask(url).rewards == EXPECTED
    assert len(server.bodies) <= 2


def test_the_protocol_is_found_out_although_the_server_fails_first_and_no_fault_becomes_a_reward(serve, ask):
    server = serve(OF_PADDLENLP, protocol="paddlenlp")
    assert ask(server.url, attempts=len(OF_PADDLENLP) + 1).rewards == EXPECTED
    # As long as no reply was good, the other protocol is tried at the address too: its server refuses that.
    assert sum("src" in json.loads(body) for body in server.bodies) == len(OF_PADDLENLP) + 1


def test_the_bytes_of_a_paddlenlp_request_are_those_of_its_own_client(serve, ask):
    server = serve(protocol="paddlenlp")
    request = make_reward_request(["你 1", "2"], ["a\n", None], prompts=["<p>", '"'])
    ask(server.url, request=request, token="a secret")
    assert server.bodies == [b'{"src": ["<p>", "\\""], "tgt": ["a\\n", ""], "response": ["\\u4f60 1", "2"]}']
    assert server.headers[0]["Content-Type"] == "application/json"
    assert server.headers[0]["Authorization"] == "Bearer a secret"


def test_the_token_may_come_from_the_environment(serve, ask, monkeypatch):
    monkeypatch.setenv("TRIMTAB_BEARER_TOKEN", "from outside")
    server = serve()
    ask(server.url)
    assert server.headers[0]["Authorization"] == "Bearer from outside"


def test_several_addresses_share_the_samples_in_order(serve, ask):
    servers = [serve() for _ in range(3)]
    assert ask(*(server.url for server in servers)).rewards == EXPECTED
    assert [len(json.loads(server.bodies[0])["query"]) for server in servers] == [4, 4, 2]


def test_what_one_address_cannot_answer_another_does(serve, ask):
    broken, good = serve(itertools.repeat(500)), serve()
    assert ask(broken.url, good.url, protocol="openrlhf").rewards == EXPECTED
    as_observation_error = serve(itertools.repeat(404))
    assert ask(as_observation_error.url, good.url, protocol="openrlhf").rewards == EXPECTED


def test_requests_have_at_most_the_asked_number_of_samples(serve, ask):
    server = serve()
    assert ask(server.url, batch_size=3).rewards == EXPECTED
    assert sorted(len(json.loads(body)["query"]) for body in server.bodies) == [1, 3, 3, 3]


def test_labels_of_every_kind_can_be_sent(serve, ask):
    server = serve()
    ask(server.url, request=make_reward_request(["1", "2", "3"], [{"a": [1]}, np.array([1, 2]), None]))
    assert json.loads(server.bodies[0])["labels"] == [{"a": [1]}, [1, 2], None]


@pytest.mark.parametrize("url", ["localhost:5000", "ftp://x/y", "http://", ""])
def test_an_address_that_is_none_is_one_line(url):
    with pytest.raises(UserError, match="--remote_rm_url"):
        RemoteReward([url])


def test_a_protocol_that_nobody_speaks_is_one_line():
    with pytest.raises(UserError, match="one of openrlhf, paddlenlp"):
        RemoteReward(["http://localhost"], protocol="soap")


def test_nothing_is_asked_for_no_samples(ask):
    assert len(ask("http://127.0.0.1:9", request=make_reward_request([]))) == 0
