"""Requests to the servers of a policy and of a reward model, one after another, and what they reply."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

DATA = "../../data"
ASKED = [{"role": "user", "content": "What is 1 + 2?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
PLAIN = {"messages": ASKED, "max_tokens": 6, "seed": 3, "return_token_ids": True}
# Of one answer alone: of several the last bits depend on which of them meet in a pass.
CHAT = {**PLAIN, "logprobs": True, "top_logprobs": 2}
REQUESTS = [
    ("/v1/models", None),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**PLAIN, "n": 2, "stop": ["a"], "tools": [TOOL]}),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 5, "seed": 1, "temperature": 0.7}),
    ("/v1/completions", {"prompt": "three", "max_tokens": 5, "seed": 1, "logprobs": 1, "temperature": 0.7}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5, "top_p": 0.5, "seed": 2}),
    ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5, "seed": 4}}),
    ("/tokenize", {"messages": ASKED}),
    ("/detokenize", {"tokens": [40, 41, 42]}),
    ("/s/one/v1/chat/completions", CHAT),
    ("/s/one/v1/chat/completions", {**CHAT, "messages": [*ASKED, {"role": "user", "content": "And 2 + 3?"}]}),
    ("/s/one/trace", None),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/completions", {"prompt": "one", "max_tokens": -1}),
    ("/nowhere", {}),
]
REWARDED = [
    (
        "/get_reward",
        {"query": ["sort 21>12", "sort 31>13"], "prompts": ["sort 21>", "sort 31>"], "labels": ["12", "1"]},
    ),
    ("/get_reward", {"query": "sort 21>12"}),
    ("/get_reward", {}),
]


@contextmanager
def running(words):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "trimtab.cli.main", *words.split(), "--port", str(port)]
    server = subprocess.Popen([*command, "--bearer_token", "none"])
    try:
        while reply(port, "/health", None)[0] != 200:
            assert server.poll() is None, "the server has ended"
            time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait()


def reply(port, path, body):
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", content, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def plain(text):
    """Without names and times that are each reply's own."""
    return re.sub(r'"(id|request_id)": ?"[^"]*"|"created": ?\d+|"[a-z_]*seconds": ?[\d.e-]+', "", text)


with open("replies.jsonl", "w") as file:
    for words, requests in (
        (f"serve {DATA}/agent", REQUESTS),
        (f"serve-rm --reward_pretrain {DATA}/reward --max_len 64", REWARDED),
    ):
        with running(words) as port:
            for path, body in requests:
                code, text = reply(port, path, body)
                row = {"path": path, "code": code, "reply": plain(text)}
                file.write(json.dumps(row) + "\n")
