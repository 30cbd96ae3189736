"""Peak memory of each process that learns from one row: alone, as one of two that share its tokens (context 2), and as
one of two that share its layers (tensor 2). Forward and backward pass of a Llama in fp32, --zero_stage 3.

    long row       4 layers, 512 wide, a row of 8,192 tokens: most of it are activations
    large model    16 layers, 1,024 wide, a row of 512 tokens: most of it are weights and gradients

Every way of splitting is a world of processes of its own. What a process holds is its anonymous memory (pages of mapped
files are not memory) above what it held before the model was loaded: weights, gradients, activations and what is
exchanged.

    python benchmarks/split_memory.py [--only "large model"]
"""

import argparse
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

WAYS = {
    "one process": (1, ""),
    "context 2": (2, "--ring_attn_size 2"),
    "tensor 2": (2, "--ds_tensor_parallel_size 2"),
}
CHECKPOINTING = "--gradient_checkpointing"
COMMON = {"num_key_value_heads": 4, "vocab_size": 8192, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WORKS = {
    "long row": (
        8192,
        {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8},
    ),
    "large model": (
        512,
        {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16},
    ),
}
PAUSE = 0.005


def anonymous() -> int:
    """Bytes that belong to this process alone."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def measure(folder: str, words: str, tokens: int, environment: dict, answers) -> None:
    os.environ.update(environment)
    import numpy as np
    import torch

    from trimtab.config.jobs import SFTOptions
    from trimtab.config.parser import parse
    from trimtab.data.batches import TokenBatch
    from trimtab.distributed.device import find_device
    from trimtab.distributed.process_group import find_world, leave_world
    from trimtab.models.load import load_policy
    from trimtab.models.parallel.sharded_model import mesh_of

    torch.set_num_threads(1)
    options = parse(SFTOptions, f"--pretrain {folder} --dataset none --zero_stage 3 {words}".split())
    mesh = mesh_of(options, find_world(find_device()))
    mesh.all.wait()
    before, peak, done = anonymous(), 0, threading.Event()
    policy = load_policy(options, find_device(), mesh).model
    if mesh.size == 1:  # pages of the file, until an optimiser writes them
        for parameter in policy.parameters():
            parameter.data = parameter.data.clone()

    def learn(length: int) -> float:
        ids = np.random.default_rng(0).integers(3, 8192, length)
        loss = -policy(TokenBatch.of([(ids, np.arange(length) > 0)])).log_probs_N.mean()
        (loss * mesh.gradients.size).backward()
        return loss.item()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(PAUSE)

    learn(64)  # what is made once
    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    loss = learn(tokens)
    seconds = time.monotonic() - began
    done.set()
    watcher.join()
    answers.put(((peak - before) / 2**20, loss, seconds))
    leave_world()


def run(folder: str, processes: int, words: str, tokens: int) -> tuple[float, float, float]:
    """The largest peak, the loss and the seconds of a world."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    started = [
        spawn.Process(target=measure, args=(folder, words, tokens, world | {"RANK": r, "LOCAL_RANK": r}, answers))
        for r in map(str, range(processes))
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
        assert process.exitcode == 0, f"{words}: see above"
    found = [answers.get() for _ in started]
    return max(peak for peak, _, _ in found), found[0][1], max(seconds for _, _, seconds in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WORKS, nargs="*", default=list(WORKS))
    arguments = parser.parse_args()
    # Large blocks go back at once: what is measured is what is held, not what the allocator keeps.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    from transformers import LlamaConfig, LlamaForCausalLM

    from trimtab.embedded.sort_task import make_tokenizer

    print("| work | gradient checkpointing | split | MiB a process | of one process | loss | seconds |")
    print("|---|---|---|---|---|---|---|")
    for work in arguments.only:
        tokens, shape = WORKS[work]
        with tempfile.TemporaryDirectory() as folder:
            config = LlamaConfig(**COMMON, **shape, max_position_embeddings=tokens)
            LlamaForCausalLM(config).save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
            for more in ("", CHECKPOINTING):
                whole = None
                for way, (processes, words) in WAYS.items():
                    peak, loss, seconds = run(folder, processes, f"{words} {more}", tokens)
                    whole = whole or peak
                    figures = f"{peak:,.0f} | {peak / whole:.2f} | {loss:.5f} | {seconds:.0f}"
                    print(f"| {work} | {'yes' if more else 'no'} | {way} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
