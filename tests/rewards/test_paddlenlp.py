"""PaddleNLP's client against our server. It is written here from the protocol, with the standard library: the bytes on
the wire are what is compared. tests/rewards/test_client.py has our client against PaddleNLP's server."""

import json
import re
import socket

import pytest

from tests.rewards.running import running
from trimtab.data.conversion import prompt_of, source_and_target
from trimtab.embedded.knights_task import make_puzzles
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


def test_the_prompt_that_is_sent_has_its_whole_template():
    assert prompt_of("Zoey says: Owen lies. Who is what?") == PROMPT
