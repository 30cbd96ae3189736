"""DPO tokens per second against TRL, in one run on this machine's CPU.

The model and lengths of sft_speed.py: prompts of 16 to 256 tokens with two answers of as many. 64 pairs a step, fp32,
fused AdamW, the reference scored in every step (first table) or beforehand (second). A token of a prompt counts twice,
once for each answer, on both sides. TRL is tried at several settings and its best counts.

    python benchmarks/dpo_speed.py
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from datasets import Dataset, disable_progress_bars
from sft_speed import BATCH, VOCABULARY, StepClock, write_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging


def make_pairs(steps: int) -> list[dict]:
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(steps * BATCH):
        words = lambda n: " ".join(f"w{i}" for i in rng.integers(3, VOCABULARY, n))  # noqa: E731
        length = int(rng.integers(16, 257))
        pairs.append({"prompt": words(length) + " ", "chosen": words(length), "rejected": words(length)})
    return pairs


def tokens_of(pairs: list[dict]) -> int:
    """Both sequences of every pair, with their end tokens."""
    return sum(2 * len(p["prompt"].split()) + len(p["chosen"].split()) + len(p["rejected"].split()) + 2 for p in pairs)


def time_trimtab(folder: Path, pairs: list[dict], words: str) -> float:
    from trimtab.cli.train_dpo import main
    from trimtab.train.metrics import read_rows

    (folder / "train.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    out = Path(tempfile.mkdtemp(dir=folder))
    fixed = (
        f"--pretrain {folder} --dataset {folder}/train.jsonl --max_epochs 1 --train_batch_size {BATCH} --max_len 520 "
        f"--learning_rate 1e-5 --save_path {out} --ckpt_path {out}/ck"
    )
    assert main([*fixed.split(), *words.split()]) == 0
    timed = read_rows(out / "metrics.jsonl")[1:]
    seconds = sum(r["seconds"] for r in timed)
    return tokens_of(pairs) * len(timed) / (len(timed) + 1) / seconds


def time_trl(folder: Path, pairs: list[dict], per_device: int, **settings) -> float:
    from trl import DPOConfig, DPOTrainer

    clock = StepClock()
    arguments = DPOConfig(
        tempfile.mkdtemp(dir=folder), per_device_train_batch_size=per_device, max_length=520,
        gradient_accumulation_steps=BATCH // per_device, num_train_epochs=1, learning_rate=1e-5,
        optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_steps=100,
        gradient_checkpointing=False, use_cpu=True, bf16=False, disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = DPOTrainer(
        LlamaForCausalLM.from_pretrained(folder),
        LlamaForCausalLM.from_pretrained(folder),
        arguments,
        train_dataset=Dataset.from_list(pairs),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        callbacks=[clock],
    )
    trainer.train()
    return tokens_of(pairs) * (len(clock.times) - 1) / len(clock.times) / (clock.times[-1] - clock.times[0])


def compare(folder: Path, pairs: list[dict], precompute: bool) -> None:
    print("reference scored beforehand" if precompute else "reference scored in every step")
    trl, ours = {}, {}
    settings = {"precompute_ref_log_probs": True} if precompute else {}
    for per_device in (4, 8, 16):
        trl[per_device] = time_trl(folder, pairs, per_device, **settings)
        print(f"  TRL, micro-batch {per_device:<31d} {trl[per_device]:10,.0f} tokens/s", flush=True)
    switch = " --precompute_ref_log_probs" if precompute else ""
    for words in ("--packing_samples --micro_train_batch_size 8", "--micro_train_batch_size 8"):
        ours[words] = time_trimtab(folder, pairs, words + switch)
        print(f"  trimtab {words:40s} {ours[words]:10,.0f} tokens/s", flush=True)
    best = max(trl, key=trl.get)
    again = time_trl(folder, pairs, best, **settings)
    print(f"  TRL, micro-batch {best}, again {again:34,.0f} tokens/s")
    print(f"  ratio: {max(ours.values()) / max(*trl.values(), again):.2f} (best against best)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    pairs = make_pairs(parser.parse_args().steps)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    folder = Path(tempfile.mkdtemp())
    write_model(folder)
    for precompute in (False, True):
        compare(folder, pairs, precompute)


if __name__ == "__main__":
    main()
