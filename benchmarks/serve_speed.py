"""Tokens a second of `trimtab serve` with many clients, against the engine alone with the same requests at once.

Every request is a prompt of token ids, and every answer has as many tokens as were asked for, with log-probs: all as
many, so that they end together, or with --spread some more and some fewer, as in life. `engine` is one call in a
process of its own. The server has processes of its own too, and so have the clients, which speak plain HTTP over
connections that stay open, wait for each answer and take the next of all requests. Where there are no more clients
than --places (unset: as many as the fewest clients), a place is empty until its client has asked again; with twice as
many somebody always waits for it, as in the one call. Several --tokens, --spread and --clients are measured one after
another with one engine, by prompts that it has not seen.

Without --model a Llama of --size with random weights is made. `--peer vllm` also asks vLLM's own server, where it is
installed, for the same with the same clients; `--peer LLM` asks its engine for all of them at once, in one process and
without a server.

    python benchmarks/serve_speed.py
    python benchmarks/serve_speed.py --size 135M --bf16 --requests 2048 --clients 256 512 --tokens 64 512 --peer vllm
    python benchmarks/serve_speed.py --timeline timeline.jsonl  # then: serve_timeline.py --show timeline.jsonl
"""

import argparse
import http.client
import itertools
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from serve_clients import Asked, through_server

SECONDS_TO_START = 600

Shape = tuple[int, float]  # tokens of an answer, and their spread

SIZES = {  # width, inner width, layers, heads, heads of keys, vocabulary
    "small": (256, 688, 6, 4, 4, 8192),
    "135M": (576, 1536, 30, 9, 3, 49_152),
    "1.7B": (2048, 8192, 24, 32, 32, 49_152),
}


def make_model(folder: Path, size: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trimtab.embedded.sort_task import make_tokenizer

    tokenizer = make_tokenizer()
    width, inner, layers, heads, key_heads, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(16, vocabulary) for _ in range(length)] for _ in range(count)]


def make_lengths(count: int, tokens: int, spread: float) -> list[int]:
    numbers = random.Random(1)
    return [max(1, round(tokens * numbers.uniform(1 - spread, 1 + spread))) for _ in range(count)]


# ---- the engine alone, in a process of its own so that its memory is given back


def engine_alone(model: str, bf16: bool, slots: int, works: list[list[Asked]], answer) -> None:
    from trimtab.config.jobs import ServeOptions
    from trimtab.data.tokenizer import load_tokenizer
    from trimtab.distributed.device import find_device
    from trimtab.models.load import load_frozen_policy
    from trimtab.rollout.factory import build_engine
    from trimtab.rollout.sampling import SamplingParams

    options = ServeOptions(pretrain=model, bf16=bf16)
    policy = load_frozen_policy(model, options, find_device(), flag="--pretrain").model
    engine = build_engine(policy, load_tokenizer(model), max_num_seqs=slots)

    def drawn(work: list[Asked]) -> int:
        prompts, tokens = zip(*work)
        rollouts = engine.generate(prompts, SamplingParams(max_new_tokens=max(tokens)), limits=tokens)
        return sum(len(rollout.tokens) for rollout in rollouts)

    tell_rates(drawn, works, answer)


def vllm_alone(model: str, bf16: bool, slots: int, works: list[list[Asked]], answer) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model, skip_tokenizer_init=True, dtype="bfloat16" if bf16 else "float32", max_num_seqs=slots,
        max_model_len=2048, gpu_memory_utilization=0.8, enable_prefix_caching=False,
    )  # fmt: skip
    usual = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}

    def drawn(work: list[Asked]) -> int:
        asked = [{"prompt_token_ids": prompt} for prompt, _ in work]
        sampling = [SamplingParams(max_tokens=count, **usual) for _, count in work]
        return sum(len(each.outputs[0].token_ids) for each in engine.generate(asked, sampling, use_tqdm=False))

    tell_rates(drawn, works, answer)


def tell_rates(drawn: Callable[[list[Asked]], int], works: list[list[Asked]], answer) -> None:
    for work in works:
        drawn(work)  # warm up: what it has read it forgets
        began = time.monotonic()
        answer.put(drawn(work) / (time.monotonic() - began))


def at_once(engine: Callable[..., None], *given, works: dict[Shape, list[Asked]]) -> dict[Shape, float]:
    """Tokens a second of an engine in a process of its own, for each of the works."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=engine, args=(*given, list(works.values()), answer))
    process.start()
    rates = {shape: answer.get(timeout=SECONDS_TO_START) for shape in works}
    process.join()
    return rates


# ---- through a server


def served(
    words: list[str], port: int, model: str, warm_up: list[Asked], works: list[tuple[int, list[Asked]]]
) -> Iterator[float]:
    """Tokens a second of the server that these words start at that port, for each of the works: of so many clients."""
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL) as process:
        try:
            _wait(port, process)
            for count, asked in works:
                through_server(port, model, warm_up, count)
                seconds, drawn = through_server(port, model, asked, count)
                assert drawn == sum(tokens for _, tokens in asked), "answers are missing"
                yield drawn / seconds
        finally:
            process.terminate()
            process.wait(60)


def _wait(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def main(argv: list[str] | None = None) -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--model", help="hub name or folder; unset: one of --size is made")
    words.add_argument("--size", choices=SIZES, default="small", help="of a model that is made")
    words.add_argument("--bf16", action="store_true")
    words.add_argument("--requests", type=int, default=256)
    words.add_argument("--clients", type=int, nargs="+", default=[32])
    words.add_argument("--places", type=int, help="answers that an engine draws at once; unset: the fewest clients")
    words.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    words.add_argument("--tokens", type=int, nargs="+", default=[64], help="tokens of an answer")
    words.add_argument("--spread", type=float, nargs="+", default=[0], help="so much of --tokens more or fewer")
    words.add_argument("--http_processes", type=int, help="of our server; unset: as many as it chooses")
    words.add_argument("--timeline", help="file for what the server's engine does (serve_timeline.py shows it)")
    words.add_argument("--peer", choices=["vllm", "LLM"], help="also vLLM: its server, or its engine alone")
    arguments = words.parse_args(argv)

    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or folder
        if arguments.model is None:
            make_model(Path(folder), arguments.size)
        vocabulary = AutoConfig.from_pretrained(model).vocab_size
        places, count = arguments.places or min(arguments.clients), arguments.requests
        shapes = list(itertools.product(arguments.tokens, arguments.spread, arguments.clients))
        works = [
            list(zip(make_prompts(count, arguments.prompt, vocabulary, seed), make_lengths(count, tokens, spread)))
            for seed, (tokens, spread, _) in enumerate(shapes)
        ]
        warm_up = list(zip(make_prompts(places, arguments.prompt, vocabulary, -1), [max(arguments.tokens)] * places))
        own = (model, arguments.bf16, places)
        alike = {shape[:2]: work for shape, work in zip(shapes, works)}  # an engine knows of no clients
        alone = at_once(engine_alone, *own, works=alike)
        asked = [(clients, work) for (*_, clients), work in zip(shapes, works)]

        port = free_port()
        how = ["--port", str(port), "--max_requests", str(places), "--bearer_token", "none"]
        how += ["--bf16"] * arguments.bf16
        if arguments.http_processes is not None:
            how += ["--http_processes", str(arguments.http_processes)]
        start = ["-m", "trimtab.cli.main", "serve"]
        if arguments.timeline is not None:
            start = [str(Path(__file__).with_name("serve_timeline.py")), arguments.timeline]
        print(f"places for {places}, prompts of {arguments.prompt} tokens; tokens a second")
        print(f"{'tokens':>6s} {'spread':>6s} {'clients':>7s} {'engine':>9s} {'server':>9s}")
        rates = []
        for rate, shape in zip(served([*start, model, *how], port, model, warm_up, asked), shapes):
            rates.append(rate)
            one = alone[shape[:2]]
            print("{:6d} {:6g} {:7d}".format(*shape), f"{one:9,.0f} {rate:9,.0f}  {rate / one:.2f} of it", flush=True)
        if arguments.peer == "vllm":
            port = free_port()
            how = ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", str(places)]
            how += ["--dtype", "bfloat16" if arguments.bf16 else "float32"]
            start = ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
            peers = list(served([*start, *how], port, model, warm_up, asked))
        elif arguments.peer == "LLM":
            theirs = at_once(vllm_alone, *own, works=alike)
            peers = [theirs[shape[:2]] for shape in shapes]
        else:
            return
        for shape, rate, peer in zip(shapes, rates, peers):
            shown = f"{arguments.peer} {peer:,.0f}, our server {rate / peer:.2f} times that"
            print("{:6d} {:6g} {:7d}".format(*shape), shown, flush=True)


if __name__ == "__main__":
    main()
