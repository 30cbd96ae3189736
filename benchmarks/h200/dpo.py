"""DPO of 1.7B on pairs of 1,024 tokens against TRL, in one run; the reference is scored in every step.

32 pairs a step: a prompt of 512 tokens, two answers of 512, so both sequences of a pair have 1,024 and nothing is
padded on either side. fp32 masters here, pure bf16 weights there; no recomputation.

    python benchmarks/h200/dpo.py
"""

import argparse
import tempfile

import torch
from runs import Bench, StepClock, median
from shapes import make_texts, write_rows


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="1.7B")
    parser.add_argument("--steps", type=int, default=4, help="of ours; the first is start-up")
    parser.add_argument("--peer_steps", type=int, default=3)
    parser.add_argument("--peer_rows", type=int, default=4, help="pairs in a pass of the peer")
    parser.add_argument("--tokens", type=int, default=32_768, help="in a pass of ours")


class Task:
    def __init__(self, bench: Bench):
        self.bench, self.shape = bench, bench.shape(bench.arguments.shape)
        self.pairs, self.half = (4, 16) if bench.tiny else (32, 512)
        self.model = bench.model(bench.arguments.shape)
        count = max(bench.arguments.steps, bench.arguments.peer_steps) * self.pairs
        words = [make_texts(count, self.half - (seed > 0), self.shape, seed) for seed in range(3)]
        self.rows = [
            {"prompt": prompt + " ", "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in zip(*words)
        ]
        write_rows(bench.folder / "train.jsonl", self.rows)
        lengths, rates = [2 * self.half] * 2 * self.pairs, bench.rates
        self.tokens = sum(lengths)
        # Forward and backward of the policy, forward of the reference.
        self.least = rates.update(self.shape, lengths, self.tokens // 2, passes=4.0)

    def report(self, who: str, seconds: float, **more: object) -> float:
        name, speed = f"DPO {self.bench.arguments.shape}", self.tokens / seconds
        self.bench.row(name, who=who, seconds=seconds, tokens_per_second=speed, share=self.least / seconds, **more)
        return seconds


def time_ours(task: Task, variant: str) -> float:
    from trimtab.cli.train_dpo import main

    bench, folder = task.bench, task.bench.folder
    rows = bench.command(
        main,
        f"--pretrain {task.model} --dataset {folder}/train.jsonl --max_epochs 1 --train_batch_size {task.pairs} "
        f"--max_len {2 * task.half} --learning_rate 1e-6 --packing_samples "
        f"--train_max_tokens_per_gpu {min(bench.arguments.tokens, task.tokens)} "
        f"--max_samples {bench.arguments.steps * task.pairs}",
        variant,
    )
    first, later = rows[0], rows[1:]
    more = {"start_up": first["seconds"], "compiling": first.get("seconds_compile", 0.0)}
    memory = max(row.get("memory_gib", 0.0) for row in rows)
    return task.report(
        f"trimtab {variant}".strip(), median([row["seconds"] for row in later]), memory_gib=memory, **more
    )


def time_trl(task: Task) -> float:
    from datasets import Dataset
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    bench, clock = task.bench, StepClock(task.bench.device)
    a_pass = min(bench.arguments.peer_rows, task.pairs)
    kind = torch.float32 if bench.tiny else torch.bfloat16
    trainer = DPOTrainer(
        LlamaForCausalLM.from_pretrained(task.model, dtype=kind),
        LlamaForCausalLM.from_pretrained(task.model, dtype=kind),
        DPOConfig(
            tempfile.mkdtemp(dir=bench.folder), per_device_train_batch_size=a_pass, max_length=2 * task.half,
            gradient_accumulation_steps=task.pairs // a_pass, max_steps=bench.arguments.peer_steps, learning_rate=1e-6,
            optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_steps=100,
            gradient_checkpointing=False, use_cpu=bench.device.type == "cpu", bf16=not bench.tiny, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(task.rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(task.model),
        callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    return task.report("TRL", clock.seconds)


def main(argv: list[str] | None = None) -> None:
    bench = Bench(__doc__, argv, options=options)
    task, found = Task(bench), {}
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
