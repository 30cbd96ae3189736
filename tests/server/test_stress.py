"""32 clients and 10,000 requests, with faults among them: every answer is the engine's own, and memory stays flat."""

import asyncio
import gc
import os
import random
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.server.running import CONTEXT, engine, running, tokenizer
from trimtab.rollout.sampling import SamplingParams
from trimtab.server.http_workers import HTTPWorkerProcesses
from trimtab.server.sessions import stream_seed

CLIENTS, REQUESTS, KINDS = 32, 10_000, 200


def resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def questions():
    """Prompts with settings of their own, and what the engine draws for each alone."""
    numbers, found = random.Random(0), []
    for number in range(KINDS):
        ids = [numbers.randrange(3, len(tokenizer())) for _ in range(numbers.randrange(1, 40))]
        how = {"max_tokens": numbers.randrange(1, 12), "temperature": numbers.choice([0.7, 1.0, 1.0, 1.3])}
        sampling = SamplingParams(
            max_new_tokens=how["max_tokens"],
            temperature=how["temperature"],
            stop_token_ids=(tokenizer().eos_token_id,),
        )
        seed = stream_seed(number, None, len(ids))
        found.append(({"seed": number, **how}, ids, engine(6).generate([ids], sampling, seeds=[seed])[0]))
    return found


def is_own(expected, tokens, log_probs) -> tuple[bool, bool]:
    """Whether an answer is the expected one, and whether it parts from it only where two tokens lay on one edge."""
    if tokens == expected.ids:
        return bool(np.allclose(log_probs, expected.log_probs, atol=1e-5)), False
    same = next((n for n, (a, b) in enumerate(zip(tokens, expected.ids)) if a != b), 0)
    return same > 0 and bool(np.allclose(log_probs[:same], expected.log_probs[:same], atol=1e-5)), True


FAULTS = [
    ({"content": b"{"}, 400),
    ({"content": b"\xff" * 100}, 400),
    ({"json": {"prompt": [10**6]}}, 400),
    ({"json": {"prompt": [5] * CONTEXT}}, 400),
    ({"json": {"prompt": [5], "temperature": -1}}, 400),
    ({"json": {"prompt": [5], "model": "other"}}, 404),
    ({"content": b"a" * 2_000_000}, 413),
]


async def load(server, asked):
    """(answers, wrong ones, those that parted at an edge, memory after a fifth of them, and at the end)"""
    counts = {"answers": 0, "wrong": 0, "edges": 0}
    memory = []
    numbers = iter(range(REQUESTS))
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

        async def talk(own):
            draw = random.Random(own)
            for number in numbers:
                if number == REQUESTS // 5:
                    memory.append(resident())
                if draw.random() < 0.1:
                    fault, status = draw.choice(FAULTS)
                    reply = await client.post("/v1/completions", **fault)
                    counts["wrong"] += reply.status_code != status or "error" not in reply.json()
                    continue
                how, ids, expected = draw.choice(asked)
                if draw.random() < 0.03:  # goes away before the answer
                    with pytest.raises((httpx.TimeoutException, asyncio.CancelledError)):
                        body = {"prompt": ids, "max_tokens": 400, "ignore_eos": True}
                        await client.post("/v1/completions", json=body, timeout=0.01)
                    continue
                if draw.random() < 0.5:
                    body = {"token_ids": ids, "sampling_params": how}
                    reply = (await client.post("/inference/v1/generate", json=body)).json()["choices"][0]
                    log_probs = [one["logprob"] for one in reply["logprobs"]["content"]]
                else:
                    body = {"prompt": ids, "logprobs": 0, "return_token_ids": True, **how}
                    reply = (await client.post("/v1/completions", json=body)).json()["choices"][0]
                    log_probs = reply["logprobs"]["token_logprobs"]
                right, edge = is_own(expected, reply["token_ids"], log_probs)
                counts["answers"] += 1
                counts["wrong"] += not right
                counts["edges"] += edge

        await asyncio.gather(*map(talk, range(CLIENTS)))
    memory.append(resident())
    return counts, memory


@pytest.mark.long
@pytest.mark.parametrize("count", [0, 2])
def test_no_answer_is_wrong_lost_or_swapped_among_ten_thousand_of_32_clients(count, tmp_path):
    """`count`: processes of the HTTP side."""
    asked = questions()
    tokenizer().save_pretrained(tmp_path)
    processes = HTTPWorkerProcesses(count, str(tmp_path)) if count else None
    with running(engine(5), max_bytes=1_000_000, processes=processes) as server:
        counts, memory = asyncio.run(load(server, asked))
        assert server.server.queue.waiting == 0
        assert server.client.get("/health").status_code == 200
    assert counts["wrong"] == 0 and counts["answers"] > 0.8 * REQUESTS and counts["edges"] <= 5, counts
    assert memory[1] - memory[0] < 40 * 2**20, memory
