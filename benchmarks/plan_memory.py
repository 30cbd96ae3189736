"""What a plan says of memory and time against what is then measured, on this accelerator.

SFT, DPO, GRPO and PPO of three Llama shapes (135M, 360M and 1B), bf16, two steps each of at least one full pass: the
jobs as they are, with the passes that the plan proposes because nothing is said about them. Only the weights are drawn
at random on the device instead of being read, and no model is written. Each case is a process of its own with a time
limit, smallest first, and its line is printed when it ends: planned and measured peak, their ratio, the share of the
device's memory that was not used, and the last step's seconds, planned and measured.

    python benchmarks/plan_memory.py [--seconds 90] [--only 135M-sft ...] [--compile on]
    python benchmarks/plan_memory.py --tiny           # small shapes on a CPU: does the script work?
"""

import argparse
import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from trimtab.config.jobs import DPOOptions, SFTOptions
from trimtab.config.resolved_config import settle
from trimtab.config.rl_jobs import GRPOOptions, PPOOptions
from trimtab.distributed.device import find_device, total_memory
from trimtab.models import load
from trimtab.models.attention import NAME, register
from trimtab.models.parallel.sharded_checkpoint import ModelSource
from trimtab.models.selfcheck import Verdict
from trimtab.plan.hardware import of_device
from trimtab.plan.planner import make_plan
from trimtab.plan.workload import supposed
from trimtab.train import supervised
from trimtab.train.metrics import read_rows
from trimtab.train.rl import train_rl, trainer
from trimtab.train.supervised import train_supervised

SHAPES = {
    "135M": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True,
    },
    "360M": {
        "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
        "num_key_value_heads": 5, "vocab_size": 49_152, "tie_word_embeddings": True,
    },
    "1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 4_096, "tie_word_embeddings": True,
    },
}  # fmt: skip
# Length and number of a step's samples.
STEP = {"135M": (1024, 128), "360M": (1024, 128), "1B": (1024, 64), "tiny": (64, 16)}
WORDS = 1000
STEPS = 2


def make_folder(folder: Path, shape: dict) -> None:
    """A model folder without its weights, and data for every job."""
    folder.mkdir(parents=True)
    LlamaConfig(**shape, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2).save_pretrained(
        folder
    )
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
    known = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def write_data(folder: Path, length: int, samples: int) -> None:
    def text(count: int, start: int) -> str:
        return " ".join(f"w{3 + (start + i) % (WORDS - 3)}" for i in range(count))

    def write(name: str, rows: list[dict]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    prompts = [text(length // 16, i) + " " for i in range(samples * STEPS)]
    answer = length - length // 16 - 1
    write("sft.jsonl", [{"input": p, "output": text(answer, i)} for i, p in enumerate(prompts)])
    pairs = [{"prompt": p, "chosen": text(answer, i), "rejected": text(answer, i + 7)} for i, p in enumerate(prompts)]
    write("pairs.jsonl", pairs)
    write("prompts.jsonl", [{"input": p} for p in prompts])


def jobs(folder: Path, length: int, samples: int, compiled: str) -> dict[str, tuple[Callable, Callable[[], Any]]]:
    """`samples` of `length` tokens in a step."""

    def options(job: type, **more: Any) -> Callable[[], Any]:
        def make() -> Any:
            out = tempfile.mkdtemp(dir=folder)
            common = {"pretrain": str(folder), "save_path": out, "ckpt_path": f"{out}/ckpt", "bf16": True}
            common["compile"] = compiled
            device = find_device()
            return settle(job(**common, fit_memory=None if device.is_accelerator else True, **more))[0]

        return make

    written = {"max_len": length, "input_template": None, "max_epochs": 1}
    group = 8
    sampled = {
        "prompt_data": f"{folder}/prompts.jsonl",
        "prompt_max_len": length // 16 + 1,
        "generate_max_len": length // 2,
        "n_samples_per_prompt": group,
        "rollout_batch_size": 2 * samples // group,
        "train_batch_size": 2 * samples,
        "max_samples": STEPS * 2 * samples // group,
        "reward_verifier": f"length({length})",
    }
    sft = options(SFTOptions, dataset=f"{folder}/sft.jsonl", output_key="output", train_batch_size=samples, **written)
    pairs = samples // 2
    dpo = options(
        DPOOptions,
        dataset=f"{folder}/pairs.jsonl",
        prompt_key="prompt",
        train_batch_size=pairs,
        max_samples=STEPS * pairs,
        **written,
    )
    rl = {name: (train_rl, options(job, **sampled)) for name, job in (("grpo", GRPOOptions), ("ppo", PPOOptions))}
    return {"sft": (train_supervised, sft), "dpo": (train_supervised, dpo)} | rl


def draw_weights_on_the_device() -> None:
    """Reading and writing files would take the most time and tell nothing of the accelerator's memory."""

    def opened(pretrain: str, options: Any, device: Any, *_: Any, scores: Any = None, **__: Any) -> ModelSource:
        labels = {} if scores is None else {"num_labels": 1}
        config = AutoConfig.from_pretrained(pretrain, **labels)
        torch.manual_seed(0)
        with torch.device(device.torch):
            return ModelSource((LlamaForCausalLM if scores is None else LlamaForSequenceClassification)(config))

    load._open_model = opened

    def trusted(root: Any, packed_allowed: bool = True) -> Verdict:
        register()
        root.inner.set_attn_implementation(NAME)
        return Verdict("packed", "", 0.0)

    load.choose_path = trusted  # a comparison in fp32 with the model's own attention, meant for the CPU
    supervised.save_model = trainer.save_model = lambda *_, **__: None


def run_case(train: Callable, make_options: Callable[[], Any], answer: Any) -> None:
    try:
        draw_weights_on_the_device()
        options = make_options()
        train(options)
        folder = Path(options.save_path)
        manifest = json.loads((folder / "manifest.json").read_text())
        rows = read_rows(folder / "metrics.jsonl")
        resolved = (folder / "options.yaml").read_text().splitlines()
        budget = next(line.split()[1] for line in resolved if line.startswith("train_max_tokens_per_gpu"))
        planned = make_plan(options, of_device(find_device()), supposed(options), propose=True).time
        answer.send(
            {
                "planned": manifest.get("planned_memory_gib", float("nan")),
                "measured": max(row["memory_gib"] for row in rows),
                "tokens": budget,
                "seconds": rows[-1]["seconds"],
                "planned_seconds": float("nan") if planned is None else planned.whole,
                "memory": total_memory(find_device().torch) / 2**30,
            }
        )
    except BaseException as error:
        answer.send({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        traceback.print_exc()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90, help="for all cases together")
    parser.add_argument("--case_seconds", type=float, default=30, help="for one case")
    parser.add_argument("--only", nargs="+", help="cases, for example 1B-ppo")
    parser.add_argument("--compile", default="off", choices=("on", "off"), help="the layers")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    began = time.monotonic()
    processes = multiprocessing.get_context("fork")  # what is imported here is imported once
    root = Path(tempfile.mkdtemp())
    for name in ("tiny",) if arguments.tiny else ("135M", "360M", "1B"):
        length, samples = STEP[name]
        make_folder(root / name, SHAPES[name])
        write_data(root / name, length, samples)
        for job, (train, make_options) in jobs(root / name, length, samples, arguments.compile).items():
            case = f"{name}-{job}"
            left = arguments.seconds - (time.monotonic() - began)
            if arguments.only and case not in arguments.only:
                continue
            if left < 3:
                print(f"{case:<12} not run: no time left", flush=True)
                continue
            started = time.monotonic()
            here, there = processes.Pipe(duplex=False)
            child = processes.Process(target=run_case, args=(train, make_options, there))
            child.start()
            found = here.recv() if here.poll(min(left, arguments.case_seconds)) else {"error": "out of time"}
            child.kill()  # what it has to say is said
            child.join()
            print(f"{case:<12} {line_of(found)}; case took {time.monotonic() - started:.1f} s", flush=True)


def line_of(found: dict) -> str:
    if "error" in found:
        return found["error"]
    ratio, unused = found["planned"] / found["measured"], 1 - found["measured"] / found["memory"]
    return (
        f"passes of {found['tokens']} tokens: planned {found['planned']:.2f} GiB, measured {found['measured']:.2f}, "
        f"ratio {ratio:.3f}, unused {unused:.0%} of {found['memory']:.1f} GiB; last step planned "
        f"{found['planned_seconds']:.2f} s, measured {found['seconds']:.2f}"
    )


if __name__ == "__main__":
    main()
