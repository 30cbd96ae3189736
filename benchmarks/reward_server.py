"""Samples scored a second by a reward server with many clients, against scoring the same samples one by one.

A Llama of 6 layers and 256 dimensions with random weights scores texts of about 64 tokens. `direct` is one sample a
call, in this process and without HTTP; `1 client` and the others send one sample a request and wait for its answer.
The clients are processes of their own that speak plain HTTP, so that they cost as little as possible.

    python benchmarks/reward_server.py
"""

import argparse
import http.client
import json
import multiprocessing
import random
import tempfile
import threading
import time
from pathlib import Path

CLIENTS = (1, 8, 32)
PROCESSES = 4  # that the clients are threads of


def make_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from trimtab.embedded.sort_task import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_texts(count: int) -> list[str]:
    numbers = random.Random(0)
    digits = ("".join(numbers.choices("0123456789", k=numbers.randrange(40, 80))) for _ in range(count))
    return [f"<user>sort {text}><assistant>" for text in digits]


def talk(port: int, texts: list[str], answers: list[float]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for text in texts:
        body = json.dumps({"query": [text]})
        connection.request("POST", "/get_reward", body, {"Content-Type": "application/json"})
        answers += json.loads(connection.getresponse().read())["rewards"]


def clients(port: int, shares: list[list[str]], ready, answer) -> None:
    """Some clients as threads of one process; they begin together."""
    found: list[list[float]] = [[] for _ in shares]
    threads = [threading.Thread(target=talk, args=(port, *pair)) for pair in zip(shares, found)]
    ready.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answer.put((shares, found))


def through_server(port: int, texts: list[str], count: int) -> tuple[float, dict[str, float]]:
    """Seconds for all texts with so many clients, and the scores that came back."""
    context = multiprocessing.get_context("spawn")
    processes = min(PROCESSES, count)
    ready, answer = context.Barrier(processes + 1), context.Queue()
    shares = [texts[number::count] for number in range(count)]
    started = [
        context.Process(target=clients, args=(port, shares[number::processes], ready, answer))
        for number in range(processes)
    ]
    for process in started:
        process.start()
    ready.wait()
    began = time.monotonic()
    scores = {}
    for _ in started:
        for asked, found in zip(*answer.get()):
            scores |= zip(asked, found, strict=True)
    seconds = time.monotonic() - began
    for process in started:
        process.join()
    return seconds, scores


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--samples", type=int, default=2048, help="texts to score")
    samples = words.parse_args().samples

    from trimtab.config.jobs import ServeRMOptions
    from trimtab.rewards.types import RewardRequest
    from trimtab.server.http import bind, make_server
    from trimtab.server.reward_server import make_reward_app, served_reward

    texts = make_texts(samples)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        reward = served_reward(ServeRMOptions(reward_pretrain=folder))
    one_by_one = [RewardRequest([text], [""], [text], [None]) for text in texts]
    reward(one_by_one[0])  # warm up
    began = time.monotonic()
    expected = {text: reward(request).rewards[0] for text, request in zip(texts, one_by_one)}
    direct = samples / (time.monotonic() - began)
    print(f"{'direct':12s} {direct:8.0f} samples/s", flush=True)

    listening = bind("127.0.0.1", 0)
    server = make_server(make_reward_app(reward))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    for count in CLIENTS:
        seconds, scores = through_server(listening.getsockname()[1], texts, count)
        worst = max(abs(scores[text] - expected[text]) for text in texts)
        assert worst < 1e-4, "a wrong, lost or swapped score"
        name, rate = f"{count} client{'s' * (count > 1)}", samples / seconds
        print(f"{name:12s} {rate:8.0f} samples/s  {rate / direct:.2f} of direct", flush=True)
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    main()
