"""Processes of the HTTP side: whoever answers, the answer is the same. They are threads here; the last test has them as
they are. tests/server/test_faults.py has their limits, their end and their failures."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.server.running import InThreads, Scripted, engine, plain_model, running, tokenizer
from tests.server.test_faults import CHAT, COMPLETE, GENERATE, HELLO, until
from trimtab.rollout.sampling import SamplingParams
from trimtab.server import ipc
from trimtab.server.request_queue import CompletionRequest


@pytest.fixture(scope="module")
def servers():
    with running(engine(3), processes=InThreads()) as several, running(engine(4)) as one:
        yield several, one


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETE, {"prompt": [[5, 6, 7], [8]], "logprobs": 3, "n": 2, "return_token_ids": True, "max_tokens": 9}),
        (COMPLETE, {"prompt": "what", "stop": "e", "logit_bias": {"70": 4}, "temperature": 0.7, "ignore_eos": True}),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 9}),
        (COMPLETE, {"prompt": [[5, 6], [8]], "echo": True, "logprobs": 2, "max_tokens": 0}),
        (GENERATE, {"token_ids": [9, 4, 7], "sampling_params": {"max_tokens": 5, "seed": 3, "top_k": 9}}),
        (COMPLETE, {"prompt": [10**6]}),
        ("/tokenize", {"prompt": "what is the answer"}),
    ],
)
def test_a_process_of_its_own_says_what_the_engines_would(servers, path, body):
    replies = [server.post(path, {"seed": 5, **body}) for server in servers]
    assert replies[0].status_code == replies[1].status_code
    (several, numbers), (one, expected) = map(_said, replies)
    assert several == one
    assert np.allclose(numbers, expected, atol=1e-5), "in other company the last bits are others"


def _said(reply):
    """What has no names of its own in it, and its log-probs."""
    numbers = []
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
    found = [json.loads(line, parse_float=lambda text: numbers.append(float(text))) for line in lines if "{" in line]
    return [{name: value for name, value in one.items() if name not in ("id", "created")} for one in found], numbers


def test_a_session_goes_on_whichever_process_is_asked(servers):
    said, traces = [[{"role": "user", "content": "what"}] for _ in servers], []
    for server, messages in zip(servers, said):
        for turn in range(3):
            with httpx.Client(base_url=server.url, timeout=60) as client:  # a connection of its own
                reply = client.post(f"/s/a{CHAT}", json={"messages": messages, "seed": 1, "max_tokens": 8})
                messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": f"and {turn}"}]
        traces.append(server.client.get("/s/a/trace").json())
    assert said[0] == said[1]
    drawn = [[(turn["read_token_ids"], turn["token_ids"]) for turn in trace["turns"]] for trace in traces]
    assert drawn[0] == drawn[1]
    assert traces[0]["branches"] == [[0, 1, 2]], "each went on from the one before"


def test_requests_of_all_processes_are_counted_together(servers):
    server = servers[0]

    def counted(status):
        lines = server.client.get("/metrics").text.splitlines()
        name = f'trimtab_policy_requests_total{{path="{COMPLETE}",status="{status}"}} '
        return sum(int(line.removeprefix(name)) for line in lines if line.startswith(name))

    before = counted(200), counted(400)
    for number in range(6):
        with httpx.Client(base_url=server.url, timeout=60) as client:
            client.post(COMPLETE, json={"prompt": [5], "max_tokens": 2})
            client.post(COMPLETE, json={"prompt": "", "session_id": "b"} if number % 2 else {"prompt": 3})
    assert (counted(200), counted(400)) == (before[0] + 6, before[1] + 6)
    assert server.client.get("/health").json()["version"] == engine(3).version


def test_requests_without_a_seed_draw_each_for_itself(servers):
    found = set()
    for _ in range(8):
        with httpx.Client(base_url=servers[0].url, timeout=60) as client:
            body = client.post(COMPLETE, json={"prompt": [5], "max_tokens": 12, "ignore_eos": True}).json()
            found |= {body["id"], body["choices"][0]["text"]}
    assert len(found) == 16


def test_what_was_let_in_before_the_end_is_answered_and_sessions_can_be_looked_at_until_then():
    with running(Scripted(lambda prompt: "x<|im_end|>"), processes=InThreads(1)) as server:
        assert server.post(f"/s/a{COMPLETE}", prompt=[5]).status_code == 200
        body = json.dumps({"prompt": [5]}).encode()
        slow = http.client.HTTPConnection(server.client.base_url.host, server.client.base_url.port, timeout=60)
        slow.putrequest("POST", f"/s/a{COMPLETE}")
        slow.putheader("Content-Length", str(len(body)))
        slow.endheaders(body[:4])
        assert server.client.get("/health").status_code == 200  # the process has seen both
        server.server.stop()
        until(lambda: server.client.get("/health").status_code == 503)
        assert "trimtab_policy_sessions 1\n" in server.client.get("/metrics").text
        assert len(server.client.get("/s/a/trace").json()["turns"]) == 1
        slow.send(body[4:])
        assert slow.getresponse().status == 200
        slow.close()


def test_a_setting_is_read_as_it_was_written():
    own = SamplingParams(
        *(7, 2, 0.5, 3, 0.9, 0.1, 2, 1.5, (4, 5), ("é", '"'), {6: -1.5}, (8,), -(2**62)),
        plain_log_probs=True,
        top_log_probs=4,
    )
    for sampling in (own, SamplingParams(), SamplingParams(logit_bias={token: 1.0 for token in range(200)})):
        turn = CompletionRequest([1, 2, 3], sampling, 2, None, -(2**63), 5, True)
        kind, number, content = _received(ipc.encode_request(9, turn))
        assert (kind, number, ipc.decode_request(content)) == (ipc.COMPLETE, 9, turn)


def _received(message):
    found = []
    protocol = ipc.MessageProtocol()
    protocol.received = lambda *parts: found.append(parts)
    for place in range(len(message)):  # in any pieces
        protocol.data_received(message[place : place + 1])
    assert len(found) == 1
    return found[0]


@pytest.mark.long
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_server_and_answer_before_where_they_can(tmp_path, ending):
    plain_model().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--port", str(port), "--http_processes", "2", "--bearer_token", "none", "--served_model_name", "m"]
    command = [sys.executable, "-m", "trimtab.cli.main", "serve", str(tmp_path), *words]
    with subprocess.Popen(command) as server, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        found = []

        def well():
            with contextlib.suppress(httpx.TransportError):
                return client.get("/health").status_code == 200

        until(well)
        fronts = _processes_of(port)
        assert len(fronts) >= 2
        body = {"prompt": [5], "max_tokens": 400, "ignore_eos": True}
        asking = threading.Thread(target=lambda: found.append(httpx.post(f"{client.base_url}{COMPLETE}", json=body)))
        if ending == signal.SIGTERM:
            asking.start()
            until(lambda: "waiting_requests 1" in client.get("/metrics").text)
        server.send_signal(ending)
        code = server.wait(30)
    if ending == signal.SIGTERM:
        asking.join(30)
        assert code == 0 and found[0].status_code == 200
    until(lambda: not any(Path(f"/proc/{number}").exists() for number in fronts))


def _processes_of(port):
    """Those that have the socket that listens at this port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    found = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if sockets & {os.readlink(link) for link in folder.iterdir()}:
                found.append(int(folder.parent.name))
    return found
