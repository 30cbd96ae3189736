"""SFT of 1.7B on full rows against TRL with and without Liger, in one run: tokens a second, share of the matrix rate.

64 samples of 1,024 tokens a step, every token trained: nothing is padded on either side, the kindest case for a peer
that pads. fp32 masters here, pure bf16 weights there; no recomputation.

    python benchmarks/h200/sft.py
"""

import argparse
import tempfile

import torch
from runs import Bench, StepClock, median
from shapes import make_texts, write_rows


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="1.7B")
    parser.add_argument("--steps", type=int, default=5, help="of ours; the first is start-up")
    parser.add_argument("--peer_steps", type=int, default=3)
    parser.add_argument("--peer_rows", type=int, default=8, help="samples in a pass of the peer")
    parser.add_argument("--tokens", type=int, default=32_768, help="in a pass of ours")


class Task:
    def __init__(self, bench: Bench):
        self.bench, self.shape = bench, bench.shape(bench.arguments.shape)
        self.samples, self.length = (8, 32) if bench.tiny else (64, 1024)
        self.model = bench.model(bench.arguments.shape)
        steps = max(bench.arguments.steps, bench.arguments.peer_steps)
        self.texts = make_texts(steps * self.samples, self.length - 1, self.shape)
        write_rows(bench.folder / "train.jsonl", [{"input": "", "output": text} for text in self.texts])
        self.tokens = self.samples * self.length
        self.least = bench.rates.update(self.shape, [self.length] * self.samples, self.tokens)

    def report(self, who: str, seconds: float, **more: object) -> float:
        name = f"SFT {self.bench.arguments.shape}"
        share = self.least / seconds
        self.bench.row(name, who=who, seconds=seconds, tokens_per_second=self.tokens / seconds, share=share, **more)
        return seconds


def time_ours(task: Task, variant: str) -> float:
    from trimtab.cli.train_sft import main

    bench, folder = task.bench, task.bench.folder
    rows = bench.command(
        main,
        f"--pretrain {task.model} --dataset {folder}/train.jsonl --input_key output --pretrain_mode --max_epochs 1 "
        f"--train_batch_size {task.samples} --max_len {task.length} --learning_rate 1e-5 --packing_samples "
        f"--train_max_tokens_per_gpu {min(bench.arguments.tokens, task.tokens)} "
        f"--max_samples {bench.arguments.steps * task.samples}",
        variant,
    )  # fmt: skip
    first, later = rows[0], rows[1:]
    assert all(row["tokens"] == task.tokens for row in rows), [row["tokens"] for row in rows]
    more = {"start_up": first["seconds"], "compiling": first.get("seconds_compile", 0.0)}
    memory = max(row.get("memory_gib", 0.0) for row in rows)
    return task.report(
        f"trimtab {variant}".strip(), median([row["seconds"] for row in later]), memory_gib=memory, **more
    )


def time_trl(task: Task, liger: bool) -> float:
    from datasets import Dataset
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    bench, clock = task.bench, StepClock(task.bench.device)
    a_pass = min(bench.arguments.peer_rows, task.samples)
    ids = [[int(word[1:]) for word in text.split()] + [2] for text in task.texts]
    trainer = SFTTrainer(
        LlamaForCausalLM.from_pretrained(task.model, dtype=torch.float32 if bench.tiny else torch.bfloat16),
        SFTConfig(
            tempfile.mkdtemp(dir=bench.folder), per_device_train_batch_size=a_pass, max_length=task.length,
            gradient_accumulation_steps=task.samples // a_pass, max_steps=bench.arguments.peer_steps,
            learning_rate=1e-5, optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_steps=100,
            use_liger_kernel=liger, gradient_checkpointing=False, use_cpu=bench.device.type == "cpu",
            bf16=not bench.tiny, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in ids]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(task.model),
        callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    return task.report("TRL, Liger" if liger else "TRL", clock.seconds)


def main(argv: list[str] | None = None) -> None:
    bench = Bench(__doc__, argv, options=options)
    task, found = Task(bench), {}
    for variant in bench.variants if bench.with_us else ():
        with bench.attempt("ours"):
            found[f"trimtab {variant}".strip()] = time_ours(task, variant)
    for liger in (False, True) if bench.with_peer else ():
        if liger and bench.device.type == "cpu":
            continue  # its kernels need an accelerator
        with bench.attempt("TRL"):
            found["TRL, Liger" if liger else "TRL"] = time_trl(task, liger)
    for who, seconds in found.items():
        bench.say(f"{who}: {seconds:.2f} s a step, {seconds / next(iter(found.values())):.2f} of the first")


if __name__ == "__main__":
    main()
