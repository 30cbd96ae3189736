"""Seconds of a PPO step of 360M with a critic, a reference and a reward model of the same size against TRL, in one run.

64 prompts of 128 tokens x 4 answers of 512 (as many rows in TRL, which knows no groups: each prompt four times), one
update a step, KL 0.05 in the rewards. TRL 1.12 is the last that has PPO; its own generation is used. Where a later TRL
is installed, the environment's TRL_WITH_PPO names the folder of one that has it.

    python benchmarks/h200/ppo.py
"""

import argparse
import os
import sys
import tempfile
import time
from itertools import pairwise

import torch
from runs import Bench, median, synchronize
from shapes import make_texts, write_rows


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="360M")
    parser.add_argument("--steps", type=int, default=4, help="of ours; the first is start-up")
    parser.add_argument("--peer_steps", type=int, default=2)
    parser.add_argument("--peer_rows", type=int, default=32, help="answers in a pass of the peer's update")


class Task:
    def __init__(self, bench: Bench):
        self.bench, self.shape = bench, bench.shape(bench.arguments.shape)
        self.prompts, self.samples, self.prompt, self.answer = (4, 2, 8, 16) if bench.tiny else (64, 4, 128, 512)
        self.answers, self.tokens = self.prompts * self.samples, 32_768
        self.policy, self.reward = (bench.model(bench.arguments.shape, reward=reward) for reward in (False, True))
        self.texts = make_texts(
            max(bench.arguments.steps, bench.arguments.peer_steps) * self.prompts, self.prompt, self.shape
        )
        write_rows(bench.folder / "prompts.jsonl", [{"input": text} for text in self.texts])

    def least(self) -> float:
        """Rollout, forward passes of four models, backward passes of two."""
        lengths, drawn, rates = [self.prompt + self.answer] * self.answers, self.answers * self.answer, self.bench.rates
        models = sum(rates.update(self.shape, lengths, head, passes=1.0) for head in (drawn, drawn, 0, 0))
        updates = sum(rates.update(self.shape, lengths, head) for head in (drawn, 0))
        return rates.decoding(self.shape, self.answers, self.prompt, self.answer) + models + updates


def time_ours(task: Task, variant: str) -> float:
    from trimtab.cli.train_ppo import main

    bench, steps = task.bench, task.bench.arguments.steps
    rows = bench.command(
        main,
        f"--pretrain {task.policy} --reward_pretrain {task.reward} --critic_pretrain {task.reward} "
        f"--prompt_data {bench.folder}/prompts.jsonl --prompt_max_len {task.prompt} --generate_max_len {task.answer} "
        f"--rollout_batch_size {task.prompts} --n_samples_per_prompt {task.samples} --train_batch_size {task.answers} "
        f"--use_dynamic_batch --train_max_tokens_per_gpu {task.tokens} "
        f"--rollout_slots {task.answers} --init_kl_coef 0.05 --actor_learning_rate 1e-6 "
        f"--critic_learning_rate 1e-6 --max_samples {steps * task.prompts} --save_steps -1 --logging_steps 1",
        variant,
    )
    first, later = rows[0], rows[1:]
    seconds = median([row["seconds"] for row in later])
    phases = {n: median([row.get(f"seconds_{n}", 0.0) for row in later]) for n in ("rollout", "scoring", "update")}
    bench.say(f"ours: first step {first['seconds']:.1f} s, then {[round(r['seconds'], 2) for r in later]}")
    memory = max(row.get("memory_gib", 0.0) for row in rows)
    more = {"start_up": first["seconds"], "compiling": first.get("seconds_compile", 0.0), "memory_gib": memory}
    bench.row(
        f"PPO {bench.arguments.shape}",
        who="trimtab",
        options=variant,
        seconds=seconds,
        share=task.least() / seconds,
        **phases,
        **more,
    )
    return seconds


def time_trl(task: Task) -> float:
    from datasets import Dataset
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    if older := os.environ.get("TRL_WITH_PPO"):
        for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
            del sys.modules[name]
        sys.path.insert(0, older)
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    bench, steps, times = task.bench, task.bench.arguments.peer_steps, []
    a_pass, kind = min(bench.arguments.peer_rows, task.answers), torch.float32 if bench.tiny else torch.bfloat16
    tokenizer = PreTrainedTokenizerFast.from_pretrained(task.policy, padding_side="left")
    prompts = [text for text in task.texts for _ in range(task.samples)]
    judge = lambda: LlamaForSequenceClassification.from_pretrained(task.reward, dtype=kind)  # noqa: E731

    class Clocked(PPOTrainer):
        def log(self, *_, **__):  # once a step, at its end
            synchronize(bench.device)
            times.append(time.monotonic())

    trainer = Clocked(
        PPOConfig(
            tempfile.mkdtemp(dir=bench.folder), per_device_train_batch_size=a_pass, num_mini_batches=1,
            gradient_accumulation_steps=task.answers // a_pass, total_episodes=steps * task.answers, num_ppo_epochs=1,
            local_rollout_forward_batch_size=max(1, task.answers // 2), response_length=task.answer,
            temperature=1.0, kl_coef=0.05, learning_rate=1e-6, num_sample_generations=0, report_to=[],
            save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, use_cpu=bench.device.type == "cpu",
            bf16=not bench.tiny,
        ),
        tokenizer,
        LlamaForCausalLM.from_pretrained(task.policy, dtype=kind),
        LlamaForCausalLM.from_pretrained(task.policy, dtype=kind),
        judge(),
        Dataset.from_list([{"input_ids": ids} for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]]),
        judge(),
    )  # fmt: skip
    trainer.train()
    seconds = median([after - before for before, after in pairwise(times)])
    bench.row(f"PPO {bench.arguments.shape}", who="TRL 1.12", seconds=seconds, share=task.least() / seconds)
    return seconds


def main(argv: list[str] | None = None) -> None:
    bench = Bench(__doc__, argv, options=options)
    task, found = Task(bench), {}
    bench.say("models and prompts written")
    for variant in bench.variants if bench.with_us else ():
        with bench.attempt("ours"):
            found[f"trimtab {variant}".strip()] = time_ours(task, variant)
    if bench.with_peer:
        with bench.attempt("TRL"):
            found["TRL"] = time_trl(task)
    for who, seconds in found.items():
        bench.say(f"{who}: {seconds:.2f} s a step, TRL takes {found.get('TRL', 0.0) / seconds:.2f} times as long")


if __name__ == "__main__":
    main()
