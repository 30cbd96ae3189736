"""What a plan says of the memory of one process in a split job, against what two processes then take.

SFT, DPO and GRPO of a Llama of 63M parameters in fp32, two processes over gloo on this CPU, two steps of two passes:
the jobs as they are, in each layout. Measured is the private memory of a process (RssAnon, looked at every 2 ms) while
it trains, less what it had before anything was loaded; planned is the same without the program. The allocator is asked
to give back at once what is freed, so that what is measured is what is alive. No model is written.

    python benchmarks/plan_layouts.py [--only "sft --zero_stage 3"] [--tiny]
"""

import argparse
import ctypes
import dataclasses
import json
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trimtab.config.jobs import TRAINED
from trimtab.config.parser import parse
from trimtab.config.resolved_config import settle
from trimtab.distributed import device as devices
from trimtab.models.pretrained import quiet_transformers
from trimtab.plan.hardware import GIB, Hardware
from trimtab.plan.planner import make_plan
from trimtab.plan.workload import supposed
from trimtab.train import supervised
from trimtab.train.rl import train_rl, trainer
from trimtab.train.supervised import train_supervised

TRAIN = {"sft": train_supervised, "dpo": train_supervised, "grpo": train_rl}
LAYOUTS = {
    "--zero_stage 2": ("sft", "dpo", "grpo"),
    "--zero_stage 3": ("sft", "dpo", "grpo"),
    "--zero_stage 3 --gradient_checkpointing": ("sft",),
    "--ds_tensor_parallel_size 2": ("sft", "grpo"),
    "--ring_attn_size 2": ("sft", "dpo"),
    "--ring_attn_size 2 --zero_stage 3 --gradient_checkpointing": ("sft",),
}
SHAPE = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 4, "vocab_size": 8192, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 512}
WORDS, LENGTH = 400, 256


def make_folder(folder: Path, shape: dict) -> None:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    # In another type than it is read in: a file that is mapped into memory as it is would not be counted.
    LlamaForCausalLM(LlamaConfig(**shape, **special)).bfloat16().save_pretrained(folder)
    known = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def write_data(folder: Path) -> None:
    def text(count: int, start: int) -> str:
        return " ".join(f"w{3 + (start + i) % (WORDS - 3)}" for i in range(count))

    def write(name: str, rows: list[dict]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    answers, samples = LENGTH - 16, range(64)
    write("sft.jsonl", [{"input": text(15, i) + " ", "output": text(answers, i)} for i in samples])
    both = [{"chosen": text(answers, i), "rejected": text(answers, i + 7)} for i in samples]
    write("dpo.jsonl", [{"prompt": text(15, i) + " "} | pair for i, pair in enumerate(both)])
    write("grpo.jsonl", [{"input": text(15, i) + " "} for i in samples])


def options_of(verb: str, folder: Path, words: str) -> Any:
    """Two steps, each of two passes a process or, in a context group, four that both work on."""
    common = f"--pretrain {folder} --save_path {folder}/out --ckpt_path {folder}/ckpt --nproc 2"
    if verb == "grpo":
        common += (
            f" --prompt_data {folder}/grpo.jsonl --input_key input --prompt_max_len 16 --generate_max_len {LENGTH - 16}"
            " --n_samples_per_prompt 4 --rollout_batch_size 4 --train_batch_size 16 --micro_train_batch_size 4"
            f" --max_samples 8 --reward_verifier length({LENGTH}) --init_kl_coef 0.01 --micro_rollout_batch_size 4"
        )
    else:
        key = "--prompt_key prompt" if verb == "dpo" else "--input_key input --output_key output"
        samples = 8 if verb == "dpo" else 16
        common += (
            f" --dataset {folder}/{verb}.jsonl {key} --max_len {LENGTH} --max_epochs 1 --train_batch_size {samples}"
            f" --micro_train_batch_size {samples // 4} --max_samples {2 * samples}"
        )
    return settle(parse(TRAINED[verb], f"{common} {words}".split()))[0]


def planned(verb: str, folder: Path, words: str) -> tuple[int, list[str]]:
    options = options_of(verb, folder, words)
    hardware = Hardware("two processes", 64 * GIB, accelerator=False)
    memory = make_plan(options, hardware, supposed(options), 2, propose=False).memory
    parts = [f"{part.name} {part.size / 2**20:.0f} {part.phases}" for part in memory.parts if part.size]
    return memory.peak, parts


def private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def run_process(verb: str, folder: Path, words: str, environment: dict[str, str], answer: Any) -> None:
    os.environ.update(environment)
    devices.keep_freed_memory = lambda: None
    ctypes.CDLL("libc.so.6").mallopt(-3, 2**16)  # from 64 KiB on every block is mapped, and unmapped when freed
    supervised.save_model = trainer.save_model = lambda *_, **__: None
    quiet_transformers()
    options = options_of(verb, folder, words)
    before, peak, done = private_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, private_bytes())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        TRAIN[verb](dataclasses.replace(options, save_path=f"{options.save_path}-{time.time_ns()}"))
    finally:
        done.set()
        watcher.join()
    answer.send(peak - before)


def measured(verb: str, folder: Path, words: str) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    # PyTorch for aarch64 allocates with mimalloc, which else keeps what is freed for a while.
    os.environ["MIMALLOC_PURGE_DELAY"] = "0"
    context, answers, children = multiprocessing.get_context("spawn"), [], []
    for rank in range(2):
        here, there = context.Pipe(duplex=False)
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        children.append(context.Process(target=run_process, args=(verb, folder, words, environment, there)))
        children[-1].start()
        there.close()
        answers.append(here)
    found = [answer.recv() for answer in answers]
    for child in children:
        child.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help='one case, for example "sft --zero_stage 3"')
    parser.add_argument("--tiny", action="store_true", help="a model that hides behind the program: does it run?")
    parser.add_argument("--parts", action="store_true", help="show what the plan is made of")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    make_folder(folder, SHAPE | (TINY if arguments.tiny else {}))
    write_data(folder)
    for words, verbs in LAYOUTS.items():
        for verb in verbs:
            if arguments.only in (None, f"{verb} {words}"):
                found = measured(verb, folder, words)
                print(line_of(verb, words, *planned(verb, folder, words), found, arguments.parts), flush=True)


def line_of(verb: str, words: str, plan: int, parts: list[str], found: list[int], show: bool) -> str:
    worst = max(found)
    line = f"{verb:<5}{words:<62} planned {plan / 2**20:6.0f} MiB, measured {worst / 2**20:6.0f}, {plan / worst:.2f}"
    return "\n      ".join([line, *(parts if show else [])])


if __name__ == "__main__":
    main()
