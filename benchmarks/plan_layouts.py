"""What a plan says of the memory of one process in a split job, against what two processes then take.

SFT, DPO and GRPO of a Llama of 63M parameters in fp32, two processes over gloo on this CPU, two steps of two passes:
the jobs as they are, in each layout. Measured is the private memory of a process (RssAnon, looked at every 2 ms) while
it trains, less what it had before anything was loaded; planned is the same without the program. The allocator is asked
to give back at once what is freed, so that what is measured is what is alive. No model is written.

With --table: planned, rehearsed (`--rehearse N`, in a process of its own) and measured, of more jobs in up to four
processes and of a smaller Llama; the rows of the table in docs/plan.md.

    python benchmarks/plan_layouts.py [--table] [--only "sft --zero_stage 3"] [--tiny]
"""

import argparse
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
from trimtab.plan.hardware import GIB, GROWTH, Hardware
from trimtab.plan.planner import make_plan
from trimtab.plan.workload import supposed
from trimtab.train import supervised
from trimtab.train.rehearsal import rehearse
from trimtab.train.rl import train_rl, trainer
from trimtab.train.supervised import train_supervised

TRAIN = dict.fromkeys(("sft", "dpo", "rm", "kto"), train_supervised) | dict.fromkeys(("grpo", "ppo"), train_rl)
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
# Of --table: a name, a job, its processes and its words.
TABLE = [
    ("ZeRO 2", "sft", 2, "--zero_stage 2"),
    ("ZeRO 3", "sft", 2, "--zero_stage 3"),
    ("tensor 2", "sft", 2, "--ds_tensor_parallel_size 2"),
    ("context 2", "sft", 2, "--ring_attn_size 2"),
    ("LoRA, ZeRO 3", "sft", 2, "--zero_stage 3 --lora_rank 8"),
    ("tensor 2 x data 2", "sft", 4, "--ds_tensor_parallel_size 2"),
    ("DPO, ZeRO 2", "dpo", 2, "--zero_stage 2"),
    ("RM, ZeRO 3", "rm", 2, "--zero_stage 3"),
    ("GRPO, ZeRO 3", "grpo", 2, "--zero_stage 3"),
    ("PPO, ZeRO 3", "ppo", 2, "--zero_stage 3"),
]
SMALL = SHAPE | {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 8, "vocab_size": 4096}
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
    write("kto.jsonl", [{"input": text(15, i) + " ", "output": text(answers, i), "label": i % 2} for i in samples])
    write("grpo.jsonl", [{"input": text(15, i) + " "} for i in samples])


def options_of(verb: str, folder: Path, words: str, processes: int = 2) -> Any:
    """Two steps, each of two passes a process or, in a context group, four that both work on."""
    common = f"--pretrain {folder} --save_path {folder}/out --ckpt_path {folder}/ckpt --nproc {processes}"
    if verb in ("grpo", "ppo"):
        common += (
            f" --prompt_data {folder}/grpo.jsonl --input_key input --prompt_max_len 16 --generate_max_len {LENGTH - 16}"
            f" --generate_min_len {LENGTH - 16}"
            " --n_samples_per_prompt 4 --rollout_batch_size 4 --train_batch_size 16 --micro_train_batch_size 4"
            f" --max_samples 8 --reward_verifier length({LENGTH}) --init_kl_coef 0.01 --micro_rollout_batch_size 4"
        )
    else:
        pairs = verb in ("dpo", "rm")
        key = "--prompt_key prompt" if pairs else "--input_key input --output_key output"
        samples, file = (8, "dpo") if pairs else (16, verb)
        common += (
            f" --dataset {folder}/{file}.jsonl {key} --max_len {LENGTH} --max_epochs 1 --train_batch_size {samples}"
            f" --micro_train_batch_size {samples // 4} --max_samples {2 * samples}"
        )
    return settle(parse(TRAINED[verb], f"{common} {words}".split()))[0]


def planned(verb: str, folder: Path, words: str, processes: int = 2) -> tuple[int, list[str]]:
    options = options_of(verb, folder, words, processes)
    hardware = Hardware("a process", 64 * GIB, accelerator=False, growth=GROWTH)
    memory = make_plan(options, hardware, supposed(options), processes, propose=False).memory
    parts = [f"{part.name} {part.size / 2**20:.0f} {part.phases}" for part in memory.parts if part.size]
    return memory.peak, parts


def run_process(verb: str, folder: Path, words: str, environment: dict[str, str], answer: Any) -> None:
    os.environ.update(environment)
    processes = int(environment["WORLD_SIZE"])
    devices.keep_freed_memory = lambda: None
    devices.return_freed_memory()
    supervised.save_model = trainer.save_model = lambda *_, **__: None
    quiet_transformers()
    options = options_of(verb, folder, words, processes)
    before, peak, done = devices.private_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, devices.private_bytes())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        TRAIN[verb](dataclasses.replace(options, save_path=f"{options.save_path}-{time.time_ns()}"))
    finally:
        done.set()
        watcher.join()
    answer.send(peak - before)


def measured(verb: str, folder: Path, words: str, processes: int = 2) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    # PyTorch for aarch64 allocates with mimalloc, which else keeps what is freed for a while.
    os.environ["MIMALLOC_PURGE_DELAY"] = "0"
    context, answers, children = multiprocessing.get_context("spawn"), [], []
    for rank in range(processes):
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


def play(verb: str, folder: Path, words: str, processes: int, answer: Any) -> None:
    options = options_of(verb, folder, words, processes)
    found = rehearse(settle(dataclasses.replace(options, rehearse=processes))[0])
    answer.send((found.meter.peak, found.planned, found.meter.peaks))


def rehearsed(verb: str, folder: Path, words: str, processes: int) -> tuple[int, int, dict[str, int]]:
    """Rehearsed and planned peak, and the rehearsed ones of each phase."""
    os.environ["MIMALLOC_PURGE_DELAY"] = "0"
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=play, args=(verb, folder, words, processes, there))
    child.start()
    there.close()
    found = here.recv()
    child.join()
    return found


def print_table(folder: Path, only: str | None, show: bool) -> None:
    print("| job and layout | processes | rehearsed / measured | planned / rehearsed |\n|---|---|---|---|", flush=True)
    for name, verb, processes, words in TABLE:
        if only not in (None, f"{verb} {words}"):
            continue
        played, plan, phases = rehearsed(verb, folder, words, processes)
        worst = max(measured(verb, folder, words, processes))
        print(f"| {name} | {processes} | {played / worst:.2f} | {plan / played:.2f} |", flush=True)
        if show:
            print(
                *(f"  {phase} {size / 2**20:.0f}" for phase, size in phases.items()), f"; measured {worst / 2**20:.0f}"
            )
            print("", *planned(verb, folder, words, processes)[1], sep="\n      ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help='one case, for example "sft --zero_stage 3"')
    parser.add_argument("--tiny", action="store_true", help="a model that hides behind the program: does it run?")
    parser.add_argument("--parts", action="store_true", help="show what the plan is made of")
    parser.add_argument("--table", action="store_true", help="rehearsals, too: the table of docs/plan.md")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    make_folder(folder, (SMALL if arguments.table else SHAPE) | (TINY if arguments.tiny else {}))
    write_data(folder)
    if arguments.table:
        print_table(folder, arguments.only, arguments.parts)
        return
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
