"""Seconds of a GRPO step against TRL, in one run on this machine's CPU.

The model of sft_speed.py: a Llama of 4 layers, 256 wide, 8,192 words, random fp32 weights. 8 prompts of 64 tokens, 8
samples each of up to 128 tokens (a random model hardly ever stops, so nearly all reach them, which is the kindest case
for padded generation), one update a step, no KL, temperature 1, fused AdamW, a reward that costs nothing. TRL is tried
at several micro-batches, with its own generation; its best counts.

    python benchmarks/grpo_speed.py
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from datasets import Dataset, disable_progress_bars
from sft_speed import VOCABULARY, StepClock, write_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 64, 128
REWARD = "def reward_func(queries, prompts, labels):\n    return [len(q) % 7 for q in queries]\n"


def make_prompts(steps: int) -> list[str]:
    rng = np.random.default_rng(0)
    words = rng.integers(3, VOCABULARY, (steps * PROMPTS, PROMPT_TOKENS))
    return [" ".join(f"w{i}" for i in row) for row in words]


def time_trimtab(folder: Path, prompts: list[str]) -> float:
    from trimtab.cli.train_grpo import main
    from trimtab.train.metrics import read_rows

    (folder / "prompts.jsonl").write_text("".join(json.dumps({"input": p}) + "\n" for p in prompts))
    (folder / "reward.py").write_text(REWARD)
    out = Path(tempfile.mkdtemp(dir=folder))
    words = (
        f"--pretrain {folder} --prompt_data {folder}/prompts.jsonl --remote_rm_url {folder}/reward.py "
        f"--prompt_max_len {PROMPT_TOKENS} --generate_max_len {NEW_TOKENS} --rollout_batch_size {PROMPTS} "
        f"--n_samples_per_prompt {SAMPLES} --train_batch_size {PROMPTS * SAMPLES} --use_dynamic_batch "
        f"--init_kl_coef 0 --actor_learning_rate 1e-6 --save_path {out} --ckpt_path {out}/ck"
    )
    assert main(words.split()) == 0
    rows = read_rows(out / "metrics.jsonl")[1:]
    for phase in ("rollout", "update"):
        print(f"    {phase:10s}{np.mean([row[f'seconds_{phase}'] for row in rows]):8.2f} s")
    print(f"    length    {np.mean([row['length'] for row in rows]):8.1f} tokens")
    return float(np.mean([row["seconds"] for row in rows]))


def time_trl(folder: Path, prompts: list[str], per_device: int) -> float:
    from trl import GRPOConfig, GRPOTrainer

    clock = StepClock()
    arguments = GRPOConfig(
        tempfile.mkdtemp(dir=folder), per_device_train_batch_size=per_device, num_generations=SAMPLES,
        gradient_accumulation_steps=PROMPTS * SAMPLES // per_device, max_completion_length=NEW_TOKENS,
        num_train_epochs=1, learning_rate=1e-6, beta=0.0, temperature=1.0, top_k=0, loss_type="bnpo",
        optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_steps=100, shuffle_dataset=False,
        gradient_checkpointing=False, use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        LlamaForCausalLM.from_pretrained(folder),
        reward_funcs=lambda prompts, completions, **_: [float(len(c) % 7) for c in completions],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        callbacks=[clock],
    )
    trainer.train()
    return (clock.times[-1] - clock.times[0]) / (len(clock.times) - 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    prompts = make_prompts(parser.parse_args().steps)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    folder = Path(tempfile.mkdtemp())
    write_model(folder)
    trl = {}
    for per_device in (16, 32, 64):
        trl[per_device] = time_trl(folder, prompts, per_device)
        print(f"TRL, micro-batch {per_device:<11d}{trl[per_device]:8.2f} s a step", flush=True)
    ours = time_trimtab(folder, prompts)
    print(f"trimtab                     {ours:8.2f} s a step", flush=True)
    best = min(trl, key=trl.get)
    again = time_trl(folder, prompts, best)
    print(f"TRL, micro-batch {best}, again   {again:8.2f} s a step")
    print(f"ratio: {min(trl[best], again) / ours:.2f} (TRL's best over ours)")


if __name__ == "__main__":
    main()
