"""PaddleNLP's client against our server and our client against PaddleNLP's server. Both of theirs are written here from
the protocol, with the standard library: the bytes on the wire are what is compared."""

import contextlib
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.rewards.running import running
from tests.rewards.samples import make_reward_request
from trimtab.data.conversion import prompt_of, source_and_target
from trimtab.embedded.knights_task import make_puzzles
from trimtab.rewards.client import RemoteReward
from trimtab.rewards.types import RewardFailed
from trimtab.rewards.verifiers import make_verifier

PUZZLE = source_and_target(
    {"quiz": "Zoey says: Owen lies. Who is what?", "solution_text_format": "(1) Zoey is a knight\n(2) Owen is a knave"}
)
(PROMPT,), (SOLUTION,) = PUZZLE["src"], PUZZLE["tgt"]
OPPOSITE = {"knight": "knave", "knave": "knight"}
WRONG = SOLUTION.replace("knave", "knight")
GOLDEN = {  # response: total
    f" Zoey \u4f60 first.</think><answer>{SOLUTION}</answer><|im_end|>": 3.0,
    f"hm</think>\n<answer>{WRONG}</answer>": -0.5,
    "hm</think><answer>(1) Zoey is a knight</answer>": -1.0,
    f"The answer is {SOLUTION}": -3.0,
}


# ---- their client, our server


class TheirClient:
    """One POST a connection, as the package requests sends it; failures of all kinds become zeros."""

    def __init__(self, url: str):
        self.url = url
        self.host, _, port = url.removeprefix("http://").partition(":")
        self.port = int(port)

    def exchange(self, content: bytes) -> tuple[bytes, bytes, bytes]:
        """Status line, headers and body of the reply."""
        head = (
            f"POST / HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nUser-Agent: python-requests/2.32.3\r\n"
            "Accept-Encoding: gzip, deflate\r\nAccept: */*\r\nConnection: keep-alive\r\n"
            f"Content-Length: {len(content)}\r\nContent-Type: application/json\r\n\r\n"
        )
        with socket.create_connection((self.host, self.port), timeout=30) as connection:
            connection.sendall(head.encode() + content)
            with connection.makefile("rb") as reply:
                status, headers = reply.readline(), b""
                while (line := reply.readline()) != b"\r\n":
                    headers += line.lower()
                (length,) = (line for line in headers.split(b"\r\n") if line.startswith(b"content-length:"))
                return status, headers, reply.read(int(length.partition(b":")[2]))

    def scores(self, src: list[str], tgt: list[str], response: list[str]) -> list[float]:
        try:
            body = self.exchange(json.dumps({"src": src, "tgt": tgt, "response": response}).encode())[2]
            return json.loads(body)["score"]
        except Exception:
            return [0.0] * len(response)


@pytest.fixture(scope="module")
def knights():
    with running(make_verifier("kk"), max_bytes=100_000) as server:
        yield TheirClient(server.url)


def test_the_four_golden_totals_come_back_byte_for_byte(knights):
    content = json.dumps({"src": [PROMPT] * 4, "tgt": [SOLUTION] * 4, "response": list(GOLDEN)}).encode()
    status, headers, body = knights.exchange(content)
    assert status == b"HTTP/1.1 200 OK\r\n" and b"content-type: application/json\r\n" in headers
    assert body == b'{"error_code":0,"error_msg":"Success","score":[3.0,-0.5,-1.0,-3.0]}'


def test_solutions_of_generated_puzzles_are_worth_three_and_their_opposites_lose(knights):
    rows = list(map(source_and_target, make_puzzles(20, 4)))
    src, tgt = [row["src"][0] for row in rows], [row["tgt"][0] for row in rows]
    right = [f"so</think><answer>{solution}</answer>" for solution in tgt]
    swapped = [re.sub("knight|knave", lambda found: OPPOSITE[found[0]], text) for text in right]
    assert knights.scores(src, tgt, right) == [3.0] * 20
    assert knights.scores(src, tgt, swapped) == [-0.5] * 20


FAULTS = {
    "a field missing": ({"src": ["p"], "tgt": [SOLUTION]}, 422, "response must be a list, not NoneType"),
    "lengths differ": (
        {"src": ["p", "q"], "tgt": [SOLUTION], "response": ["r"]},
        422,
        "tgt has 1 entries for 2 samples",
    ),
    "a number": ({"src": ["p"], "tgt": [3], "response": ["r"]}, 422, "tgt of row 0 must be text, not int"),
    "no solution": (
        {"src": ["p"], "tgt": ["42"], "response": [next(iter(GOLDEN))]},
        422,
        "kk: row 0: the label is no solution of the form '(1) Zoey is a knight': '42'",
    ),
    "no object": ([1], 422, "the request must be a JSON object, not list"),
    "too long": (
        {"src": ["p" * 200_000], "tgt": [SOLUTION], "response": ["r"]},
        413,
        "the request has more than 100000 bytes; send fewer samples at once",
    ),
}


@pytest.mark.parametrize("body, code, message", FAULTS.values(), ids=FAULTS)
def test_a_request_that_cannot_be_scored_gets_its_error_in_the_protocols_form(knights, body, code, message):
    status, _, reply = knights.exchange(json.dumps(body).encode())
    assert status.startswith(f"HTTP/1.1 {code} ".encode())
    assert reply == json.dumps({"error_code": code, "error_msg": message, "score": []}, separators=(",", ":")).encode()


def test_their_client_never_gets_a_number_for_a_failure_nor_is_it_harmed_by_one(knights):
    assert knights.scores(["p"], ["42"], [next(iter(GOLDEN))]) == [], "not the zeros that it makes up itself"
    assert knights.scores([PROMPT], [SOLUTION], [next(iter(GOLDEN))]) == [3.0]
    assert knights.scores([], [], []) == []


# ---- our client, their server


class TheirServer(ThreadingHTTPServer):
    """Scores by a table; `faults` say what goes wrong with each of the first requests."""

    daemon_threads = True

    def __init__(self, faults=()):
        super().__init__(("127.0.0.1", 0), TheirHandler)
        self.faults, self.seen = iter(faults), []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class TheirHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, self.headers["Content-Type"], content))
        body = json.loads(content)
        if not all(isinstance(body.get(name), list) for name in ("src", "tgt", "response")):
            return self.send(422, {"detail": [{"type": "missing", "loc": ["body"], "msg": "Field required"}]})
        count, scores = len(body["response"]), [GOLDEN[text] for text in body["response"]]
        match next(self.server.faults, None):
            case "exception":  # what its server answers when scoring fails: zeros, and status 200
                self.send(200, {"error_code": 500, "error_msg": "no such name", "score": [0] * count})
            case "short":
                self.send(200, {"error_code": 0, "error_msg": "Success", "score": scores[1:]})
            case "null":
                self.send(200, {"error_code": 0, "error_msg": "Success", "score": None})
            case "nan":
                self.send(200, {"error_code": 0, "error_msg": "Success", "score": [float("nan")] * count})
            case "crash":
                self.send_bytes(500, b"Internal Server Error")
            case "closed":
                self.close_connection = True
            case _:
                self.send(200, {"error_code": 0, "error_msg": "Success", "score": scores})

    def send(self, status, body):
        self.send_bytes(status, json.dumps(body, separators=(",", ":")).encode())

    def send_bytes(self, status, content):
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def asking(faults=(), **how):
    server = TheirServer(faults)
    client = RemoteReward([f"http://127.0.0.1:{server.server_port}"], pause=0.001, **how)
    try:
        yield server, lambda: client(make_reward_request(list(GOLDEN), [SOLUTION] * 4, [PROMPT] * 4)).rewards
    finally:
        client.close()
        server.shutdown()
        server.server_close()


def test_our_request_is_what_their_client_would_send_byte_for_byte():
    with asking() as (server, ask):
        assert ask() == list(GOLDEN.values())
    expected = json.dumps({"src": [PROMPT] * 4, "tgt": [SOLUTION] * 4, "response": list(GOLDEN)}).encode()
    assert server.seen == [("/", "application/json", expected)]
    assert prompt_of("Zoey says: Owen lies. Who is what?") == PROMPT, "the whole prompt, its template included"


ALL_FAULTS = ["exception", "short", "null", "nan", "crash", "closed"]


def test_every_fault_of_their_server_is_asked_again_and_none_becomes_a_reward():
    with asking(ALL_FAULTS, attempts=len(ALL_FAULTS) + 1) as (server, ask):
        assert ask() == list(GOLDEN.values())
    # As long as no reply was good, the other protocol is tried at the address too: its server refuses that.
    asked = [json.loads(content) for *_, content in server.seen]
    assert sum("src" in body for body in asked) == len(ALL_FAULTS) + 1


@pytest.mark.parametrize(
    "fault, words",
    [
        ("exception", "error 500: no such name"),
        ("short", "score: 3 for 4 samples"),
        ("null", "score"),
        ("nan", "score of row 0 is nan"),
        ("crash", "HTTP status 500 'Internal Server Error'"),
        ("closed", "disconnected"),
    ],
)
def test_a_fault_that_stays_stops_the_run_with_its_name(fault, words):
    with asking([fault] * 20, attempts=2, protocol="paddlenlp") as (_, ask), pytest.raises(RewardFailed, match=words):
        ask()
