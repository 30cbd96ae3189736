"""On-policy distillation on one accelerator: held-out accuracy and peak memory at equal seconds, in one run.

Ours over the whole vocabulary (--teacher_divergence reverse_kl), ours with the sampled token as reward, and TRL's
DistillationTrainer (beta 1: reverse KL), all on the student's own answers with the same prompts, batch, rows of a pass,
answer length, temperature 1 and learning rate. Weights that learn are fp32 in all: 2e-5 vanishes in bf16. Seconds are
of training; evaluation (greedy, held-out prompts) is not counted. The accuracy of each is that of its last evaluation
within the seconds that all have reached; TRL, which is last, is stopped where the slower of ours ended.

By default teacher and student are Llamas of SmolLM2-135M's shape on the sort task of `trimtab quickstart`: the teacher
after --teacher_rows rows of SFT, the student after --student_rows. With --teacher and --student they are the models of
these folders, with --prompts and --test as rows of `input` (text or messages) and `label`; an answer is right if it
ends in the words of the label.

    python benchmarks/h200/distill.py [--shape 360M] [--iterations 60] [--peer no]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from runs import Bench, synchronize
from shapes import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

# Nothing but the teacher is learnt from; the score is what evaluation counts.
SCORE = """
def reward_func(queries, prompts, labels):
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts)]
    right = [float(answer.split()[-len(label.split()) :] == label.split()) for answer, label in zip(answers, labels)]
    return {"rewards": [0.0] * len(right), "scores": right}
"""
KINDS = {"whole vocabulary": "--teacher_divergence reverse_kl", "sampled token": "--gamma 0"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="135M")
    parser.add_argument("--teacher", type=Path, help="a model folder; with --student, --prompts and --test")
    parser.add_argument("--student", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--test", type=Path)
    parser.add_argument("--teacher_rows", type=int, default=19_200)
    parser.add_argument("--student_rows", type=int, default=3_200)
    parser.add_argument("--batch", type=int, default=256, help="prompts of an iteration, one answer each")
    parser.add_argument("--rows", type=int, default=64, help="answers of a pass")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="iterations between evaluations")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer at the most")
    parser.add_argument("--rate", default="2e-5", help="learning rate of all")


class Task:
    def __init__(self, bench: Bench):
        from trimtab.embedded import sort_task

        self.bench, self.arguments = bench, bench.arguments
        if bench.tiny:
            few = {"teacher_rows": 64, "student_rows": 16, "batch": 4, "iterations": 2, "every": 1, "answer": 8}
            vars(self.arguments).update(few)
        given, folder = self.arguments, bench.folder
        (folder / "score.py").write_text(SCORE)
        self.teacher, self.student = given.teacher, given.student
        self.prompts, self.test = given.prompts or folder / "prompts.jsonl", given.test or folder / "test.jsonl"
        if given.prompts is None:
            needed = given.batch * given.iterations
            sort_task.write_rows(folder / "rows.jsonl", sort_task.make_rows(given.teacher_rows, seed=1))
            sort_task.write_rows(self.prompts, sort_task.make_prompts(needed, seed=2))
            sort_task.write_rows(self.test, sort_task.make_prompts(16 if bench.tiny else 256, seed=3, held_out=True))
        if self.teacher is None or self.student is None:
            start = folder / "start"
            make_model(bench.shape(given.shape), bench.device).save_pretrained(start)
            sort_task.make_tokenizer().save_pretrained(start)
            bench.release()
            self.student = self._taught(start, given.student_rows)
            self.teacher = self._taught(start, given.teacher_rows)

    def _taught(self, start: Path, rows: int) -> Path:
        from trimtab.cli.train_sft import main

        out = Path(tempfile.mkdtemp(dir=self.bench.folder))
        words = (
            f"--pretrain {start} --dataset {self.bench.folder}/rows.jsonl --input_key messages --apply_chat_template "
            f"--max_len 64 --max_samples {rows} --train_batch_size {min(64, rows)} --learning_rate 5e-4 "
            f"--save_path {out} {'' if self.bench.tiny else '--bf16'}"
        )
        assert main(words.split()) == 0
        self.bench.release()
        return out

    def rows(self, path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def accuracy(self, model: torch.nn.Module, tokenizer) -> float:
        """Share of the held-out prompts whose greedy answer is the label."""
        rows, right = self.rows(self.test), 0
        texts = [
            row["input"]
            if isinstance(row["input"], str)
            else tokenizer.apply_chat_template(row["input"], tokenize=False, add_generation_prompt=True)
            for row in rows
        ]
        for begin in range(0, len(rows), 128):
            batch = tokenizer(texts[begin : begin + 128], return_tensors="pt", padding=True, padding_side="left",
                              add_special_tokens=False, return_token_type_ids=False).to(model.device)  # fmt: skip
            with torch.no_grad():
                out = model.generate(**batch, max_new_tokens=self.arguments.answer, do_sample=False)
            answers = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            labels = [row["label"].split() for row in rows[begin : begin + 128]]
            right += sum(answer.split()[-len(label) :] == label for answer, label in zip(answers, labels))
        return right / len(rows)


Curve = list[tuple[float, float]]
"""Training seconds and held-out accuracy of every evaluation."""


def run_ours(task: Task, kind: str, variant: str) -> tuple[Curve, float]:
    from trimtab.cli.train_reinforce import main

    given, chat = task.arguments, isinstance(task.rows(task.prompts)[0]["input"], list)
    rows = task.bench.command(
        main,
        f"--pretrain {task.student} --teacher_model {task.teacher} {KINDS[kind]} --prompt_data {task.prompts} "
        f"--eval_dataset {task.test} --label_key label --reward_func {task.bench.folder}/score.py --eval_temperature 0 "
        f"--eval_n_samples_per_prompt 1 --eval_steps {given.every} {'--apply_chat_template' * chat} "
        f"--rollout_batch_size {given.batch} --train_batch_size {given.batch} --n_samples_per_prompt 1 "
        f"--micro_train_batch_size {min(given.rows, given.batch)} --micro_rollout_batch_size {given.rows} "
        f"--generate_max_len {given.answer} --init_kl_coef 0 --actor_learning_rate {given.rate} --lr_warmup_ratio 0 "
        f"--lr_scheduler constant --max_steps {given.iterations} --save_steps -1",
        variant,
    )
    curve, seconds = [], 0.0
    for row in rows:
        seconds += row.get("seconds", 0.0) - row.get("seconds_evaluation", 0.0)
        if "eval_pass_1" in row:
            curve.append((seconds, row["eval_pass_1"]))
    return curve, max(row.get("memory_gib", 0.0) for row in rows)


class EvaluationClock(TrainerCallback):
    """Seconds of a peer's training, without those of evaluation; it ends after `limit` of them."""

    def __init__(self, task: Task, tokenizer, limit: float):
        self.task, self.tokenizer, self.seconds, self.limit = task, tokenizer, 0.0, limit
        self.curve: Curve = []

    def on_train_begin(self, args, state, control, model=None, **_):
        self.measure(model)

    def on_step_end(self, args, state, control, model=None, **_):
        synchronize(self.task.bench.device)
        self.seconds += time.monotonic() - self.began
        control.should_training_stop |= self.seconds > self.limit
        if state.global_step % self.task.arguments.every == 0 or control.should_training_stop:
            self.measure(model)
        self.began = time.monotonic()

    def measure(self, model) -> None:
        model.eval()
        self.curve.append((self.seconds, self.task.accuracy(model, self.tokenizer)))
        model.train()
        self.began = time.monotonic()


def run_trl(task: Task, limit: float) -> tuple[Curve, float]:
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    bench, given = task.bench, task.arguments
    teacher_dtype = torch.float32 if bench.tiny else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(task.student, padding_side="left")
    clock, a_pass = EvaluationClock(task, tokenizer, limit), min(given.rows, given.batch)
    trainer = DistillationTrainer(
        AutoModelForCausalLM.from_pretrained(task.student, dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(task.teacher, dtype=teacher_dtype),
        args=DistillationConfig(
            tempfile.mkdtemp(dir=bench.folder), per_device_train_batch_size=a_pass, beta=1.0, temperature=1.0,
            gradient_accumulation_steps=given.batch // a_pass, max_completion_length=given.answer,
            max_steps=given.iterations, learning_rate=float(given.rate), lr_scheduler_type="constant",
            optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_steps=1000, shuffle_dataset=False,
            gradient_checkpointing=False, use_cpu=bench.device.type == "cpu", bf16=not bench.tiny, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": row["input"]} for row in task.rows(task.prompts)]),
        processing_class=tokenizer,
        callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    return clock.curve, peak_gib(bench)


def peak_gib(bench: Bench) -> float:
    return 0.0 if bench.device.type == "cpu" else torch.accelerator.max_memory_allocated(bench.device) / 2**30


def main(argv: list[str] | None = None) -> None:
    bench = Bench(__doc__, argv, options=options)
    task = Task(bench)
    bench.say(f"teacher {task.teacher}, student {task.student}")
    found: dict[str, tuple[Curve, float]] = {}
    works = {
        f"ours, {kind} {v}".strip(): (run_ours, kind, v) for kind in KINDS for v in bench.variants if bench.with_us
    }
    works |= {"TRL": (run_trl,)} if bench.with_peer else {}
    for name, (work, *how) in works.items():
        with bench.attempt(name):
            if bench.device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats(bench.device)
            if work is run_trl:
                how = [max((curve[-1][0] for curve, _ in found.values()), default=float("inf"))]
            found[name] = work(task, *how)
            curve = ", ".join(f"{seconds:.0f} s {accuracy:.1%}" for seconds, accuracy in found[name][0])
            bench.say(f"{name}: {curve}; {found[name][1]:.2f} GiB")
    equal = min((curve[-1][0] for curve, _ in found.values()), default=0.0)
    for name, (curve, memory) in found.items():
        accuracy = [value for seconds, value in curve if seconds <= equal][-1]
        figures = {"seconds": equal, "accuracy": accuracy, "start": curve[0][1], "memory_gib": memory}
        bench.row(f"distillation {bench.arguments.shape}", who=name, **figures, all_seconds=curve[-1][0])
        bench.say(f"{name}: {accuracy:.1%} after {equal:.0f} s (from {curve[0][1]:.1%}), {memory:.2f} GiB")


if __name__ == "__main__":
    main()
