"""A policy server in a thread of this process, over a tiny model or over an engine that says what a test wants."""

import contextlib
import copy
import json
import socket
import threading
from collections.abc import Callable, Iterator
from functools import cache

import httpx
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.byte_tokenizer import byte_tokenizer
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.server.http_workers import run_worker, worker_policy
from trimtab.server.policy_server import PolicyServer
from trimtab.server.request_params import ServerDefaults
from trimtab.server.sessions import ServedPolicy

CONTEXT = 512
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinking %}<think>{% endif %}{% endif -%}"""


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    texts, special = ["user assistant system what is the answer to this"] * 3, ["<pad>", "<|im_start|>", "<|im_end|>"]
    marks = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    return byte_tokenizer(texts, special, 300, **marks, chat_template=TEMPLATE)


@cache
def plain_model() -> LlamaForCausalLM:
    """Small and random; it ends its turns now and then."""
    torch.manual_seed(0)
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@cache
def engine(number: int = 0) -> BuiltinEngine:
    """Of that model; those of other numbers are the same."""
    policy = Policy(copy.deepcopy(plain_model()))
    choose_path(policy)
    return BuiltinEngine(policy, tokenizer(), prefix_caching=True)


class Scripted:
    """An engine that draws what a function makes of the prompt's text."""

    version = 7

    def __init__(self, answer: Callable[[str], str]):
        self.answer = answer
        self.asked: list[tuple[list[int], SamplingParams]] = []

    def session(self, sampling: SamplingParams) -> "ScriptedSession":
        return ScriptedSession(self)


class ScriptedSession:
    def __init__(self, engine: Scripted):
        self.engine, self.requests = engine, 0
        self.running: dict[int, tuple[list[int], SamplingParams]] = {}
        self.aborted: set[int] = set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def prepare(self, longest):
        pass

    full = False

    def add(self, prompt_ids, *, seed=None, limit=None, sampling=None, **_):
        self.running[self.requests] = prompt_ids, sampling
        self.engine.asked.append((prompt_ids, sampling))
        self.requests += 1
        return self.requests - 1

    @property
    def has_unfinished(self):
        return bool(self.running)

    def abort(self, requests=None):
        self.aborted.update(requests)

    def step(self, steps=None):
        finished = []
        for number, (prompt_ids, sampling) in list(self.running.items()):
            text = self.engine.answer(tokenizer().decode(prompt_ids))
            if number in self.aborted:
                text = ""
            elif text is None:  # not yet
                continue
            ids = tokenizer().encode(text)[: sampling.max_new_tokens]
            log_probs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
            stopped = bool(ids) and ids[-1] in sampling.stop_token_ids
            finish = "abort" if number in self.aborted else "stop" if stopped else "length"
            versions = np.full(len(ids), self.engine.version, np.int32)
            finished.append(Trajectory(number, 0, prompt_ids, ids, log_probs, finish, None, versions))
            del self.running[number]
        return finished


class Running:
    def __init__(self, engine, pinned: SamplingParams | None = None, template: str | None = TEMPLATE, **how):
        words = tokenizer()
        words.chat_template = template
        defaults = ServerDefaults((words.eos_token_id,), len(words), pinned)
        self.policy = ServedPolicy("tiny", words, defaults, CONTEXT)
        self.server = PolicyServer(self.policy, version=lambda: engine.version, **how)
        self.server.start_engine(engine)
        self.url = self.server.start()
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def post(self, path: str, body: dict | None = None, headers=None, **fields) -> httpx.Response:
        return self.client.post(path, json={**(body or {}), **fields}, headers=headers)

    def chat(self, messages: list[dict] | str, path: str = "/v1/chat/completions", headers=None, **fields) -> dict:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        reply = self.post(path, {"messages": messages, **fields}, headers)
        assert reply.status_code == 200, reply.text
        return reply.json()


@contextlib.contextmanager
def running(engine, **how) -> Iterator[Running]:
    server = Running(engine, **how)
    try:
        yield server
    finally:
        server.client.close()
        server.server.stop()
        server.server.join()


class InThreads:
    """HTTP worker processes that are threads."""

    def __init__(self, count=2):
        self.count, self.threads = count, []

    def open(self, listening, about):
        about = json.loads(json.dumps(about))
        pairs = [socket.socketpair() for _ in range(self.count)]
        for _, end in pairs:
            own = end, listening.dup(), worker_policy(about, tokenizer()), about
            self.threads.append(threading.Thread(target=run_worker, args=own))
            self.threads[-1].start()
        return [end for end, _ in pairs]

    def close(self):
        for thread in self.threads:
            thread.join(30)
