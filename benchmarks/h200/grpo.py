"""Seconds of a GRPO step on one accelerator against TRL with its own generation, in one run.

360M: 64 prompts of 128 tokens, 8 answers each of up to 512; 1.7B: 32 x 8. One update a step, temperature 1, a reward
that costs nothing. With --kl 0.01 ours also scores a reference; TRL is timed without (which only helps it), unless
--peer_kl. TRL has pure bf16 weights, we have fp32 masters.

    python benchmarks/h200/grpo.py [--shape 1.7B] [--kl 0.01] [--peer no]
"""

import argparse
import tempfile
from itertools import product

from runs import Bench, StepClock, median
from shapes import make_texts, write_rows

REWARD = "def reward_func(queries, prompts, labels):\n    return [len(q) % 7 for q in queries]\n"
SIZES = {"360M": (64, 65_536, 64), "1.7B": (32, 32_768, 16), "8B": (32, 8192, 4)}
"""Prompts; tokens in a pass of our update, and answers in a pass of the peer's: what fits, and is fast."""
PHASES = ("rollout", "scoring", "update", "compile")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="360M")
    parser.add_argument("--kl", default="0", help="coefficients of the KL, by commas: a run of ours each")
    parser.add_argument("--steps", type=int, default=4, help="of ours; the first is start-up")
    parser.add_argument("--peer_steps", type=int, default=2)
    parser.add_argument("--peer_rows", type=int, help="answers in a pass of the peer's update; by default by shape")
    parser.add_argument("--tokens", type=int, help="in a pass of our update; by default by shape")


class Task:
    def __init__(self, bench: Bench):
        self.bench, self.shape = bench, bench.shape(bench.arguments.shape)
        prompts, tokens, peer_rows = SIZES[bench.arguments.shape]
        self.tokens, self.peer_rows = bench.arguments.tokens or tokens, bench.arguments.peer_rows or peer_rows
        self.prompts, self.samples, self.prompt, self.answer = (4, 2, 8, 16) if bench.tiny else (prompts, 8, 128, 512)
        self.answers = self.prompts * self.samples
        self.model = bench.model(bench.arguments.shape)
        self.texts = make_texts(max(bench.arguments.steps, 4) * self.prompts, self.prompt, self.shape)
        write_rows(bench.folder / "prompts.jsonl", [{"input": text} for text in self.texts])
        (bench.folder / "reward.py").write_text(REWARD)

    def words(self, steps: int, kl: str) -> str:
        folder = self.bench.folder
        return (
            f"--pretrain {self.model} --prompt_data {folder}/prompts.jsonl --remote_rm_url {folder}/reward.py "
            f"--prompt_max_len {self.prompt} --generate_max_len {self.answer} --rollout_batch_size {self.prompts} "
            f"--n_samples_per_prompt {self.samples} --train_batch_size {self.answers} --use_dynamic_batch "
            f"--train_max_tokens_per_gpu {self.tokens} "
            f"--rollout_slots {self.answers} --init_kl_coef {kl} --actor_learning_rate 1e-6 "
            f"--max_samples {steps * self.prompts} --save_steps -1 --logging_steps 1"
        )

    def least(self, kl: bool, *, passes: float = 3.0) -> dict[str, float]:
        """Least seconds of the phases at the device's rates."""
        lengths, rates = [self.prompt + self.answer] * self.answers, self.bench.rates
        trained = self.answers * self.answer
        return {
            "rollout": rates.decoding(self.shape, self.answers, self.prompt, self.answer),
            "scoring": rates.update(self.shape, lengths, trained, passes=1.0) if kl else 0.0,
            "update": rates.update(self.shape, lengths, trained, passes=passes),
        }


def time_ours(task: Task, kl: str, variant: str) -> float:
    from trimtab.cli.train_grpo import main

    rows = task.bench.command(main, task.words(task.bench.arguments.steps, kl), variant)
    return report(task, kl, variant, rows[0], rows[1:])


def report(task: Task, kl: str, variant: str, first: dict, later: list[dict]) -> float:
    bench = task.bench
    seconds = median([row["seconds"] for row in later])
    phases = {name: median([row.get(f"seconds_{name}", 0.0) for row in later]) for name in PHASES[:3]}
    # Frozen weights have no gradients: one of three passes is not needed.
    least = task.least(kl != "0", passes=2.0 if "--lora_rank" in variant else 3.0)
    bench.say(
        f"ours, KL {kl} {variant}: first step {first['seconds']:.1f} s, then {[round(r['seconds'], 2) for r in later]}"
    )
    bench.row(
        f"GRPO {bench.arguments.shape}, KL {kl}", who="trimtab", options=variant, seconds=seconds, **phases,
        start_up=first["seconds"], compiling=first.get("seconds_compile", 0.0), least=sum(least.values()),
        share=sum(least.values()) / seconds,
        update_share=least["update"] / phases["update"], rollout_share=least["rollout"] / phases["rollout"],
        memory_gib=later[-1].get("memory_gib", 0.0), length=later[-1]["length"],
    )  # fmt: skip
    return seconds


def time_trl(task: Task) -> float:
    import torch
    from datasets import Dataset
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    bench, clock = task.bench, StepClock(task.bench.device)
    a_pass, steps = min(task.peer_rows, task.answers), bench.arguments.peer_steps
    trainer = GRPOTrainer(
        LlamaForCausalLM.from_pretrained(task.model, dtype=torch.float32 if bench.tiny else torch.bfloat16),
        reward_funcs=lambda prompts, completions, **_: [float(len(c) % 7) for c in completions],
        args=GRPOConfig(
            tempfile.mkdtemp(dir=bench.folder), per_device_train_batch_size=a_pass, num_generations=task.samples,
            gradient_accumulation_steps=task.answers // a_pass, max_completion_length=task.answer, max_steps=steps,
            learning_rate=1e-6, beta=0.0, temperature=1.0, top_k=0, loss_type="bnpo", optim="adamw_torch_fused",
            report_to=[], save_strategy="no", logging_steps=100, shuffle_dataset=False, gradient_checkpointing=False,
            use_cpu=bench.device.type == "cpu", bf16=not bench.tiny, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": text} for text in task.texts]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(task.model),
        callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    bench.row(f"GRPO {bench.arguments.shape}", who="TRL", seconds=clock.seconds, steps=max(1, steps - 1))
    return clock.seconds


def main(argv: list[str] | None = None) -> None:
    bench = Bench(__doc__, argv, options=options)
    task = Task(bench)
    bench.say("model and prompts written")
    ours, theirs = {}, None
    for kl, variant in product(bench.arguments.kl.split(","), bench.variants) if bench.with_us else ():
        with bench.attempt("ours"):
            ours[f"KL {kl} {variant}".strip()] = time_ours(task, kl, variant)
    if bench.with_peer:
        with bench.attempt("TRL"):
            theirs = time_trl(task)
    for words, seconds in ours.items():
        against = f", {theirs / seconds:.2f} times as fast as TRL ({theirs:.2f} s)" if theirs else ""
        bench.say(f"GRPO {bench.arguments.shape}, {words}: {seconds:.2f} s a step{against}")


if __name__ == "__main__":
    main()
