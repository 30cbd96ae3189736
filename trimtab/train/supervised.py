"""The supervised loop: one for every job that learns from a fixed set of examples.

    for every step: take its samples, cut them into micro-batches, add up gradients, step, log, evaluate, save

A step's samples, learning rate and random state follow from its number and the last checkpoint alone, so a run that
was killed and resumed is the run that was not. Which loss is learnt is the task's business (see task.py).
"""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trimtab.config.dump import to_yaml
from trimtab.data.order import SampleOrder
from trimtab.distributed.device import Device, random_state, restore_random_state
from trimtab.errors import Interrupted, RunFailed
from trimtab.models.packed import PackedModel, scoring
from trimtab.models.save import save_model
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.disk import writing
from trimtab.train.interrupts import StopRequest
from trimtab.train.manifest import compare, make_manifest, names_fingerprint, weights_fingerprint, write_json
from trimtab.train.metrics import MetricsFile, open_logs
from trimtab.train.optimiser import GRADIENT_DTYPES, Optimiser, StepReport
from trimtab.train.progress import RunProgress
from trimtab.train.task import Task

MANY_BAD_STEPS = 5  # in a row: the run stops


@dataclass
class Counters:
    """What the loop remembers besides weights; saved with every checkpoint."""

    step: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    tokens_seen: int = 0


@dataclass
class SupervisedRun:
    options: object
    task: Task
    model: PackedModel
    tokenizer: object
    device: Device
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self):
        options, task = self.options, self.task
        self.folder = Path(options.save_path)
        self.order = SampleOrder(task.samples, options.train_batch_size, options.max_epochs, options.seed)
        self.optimiser = Optimiser(
            self.model.model,
            options,
            self.order.steps,
            fused=self.device.fused_adam(),
            gradient_dtype=GRADIENT_DTYPES[options.grad_accum_dtype],
            offload=options.adam_offload,
        )
        self.checkpoints = Checkpoints(
            Path(options.ckpt_path), keep=options.max_ckpt_num, keep_gib=options.max_ckpt_mem
        )
        self.manifest = make_manifest(
            job=task.verb,
            weights=weights_fingerprint(self.model.model),
            data_order=self.order.fingerprint(task.data_fingerprint),
            seed=options.seed,
            dtype="bfloat16" if options.bf16 else "float32",
            device=self.device,
            path=self.model.path,
            model=options.pretrain,
            trainable=names_fingerprint(self.optimiser.working),
            parameters=sum(p.numel() for p in self.model.parameters()),
            trainable_parameters=sum(p.numel() for p in self.optimiser.working.values()),
            steps=self.order.steps,
            data=task.describe_data(),
        )

    # ---- the loop

    def train(self) -> None:
        resumed = self.resume() if self.options.load_checkpoint else False
        cannot_write = f"--save_path {self.folder}: cannot write there"
        with writing(cannot_write):
            self.write_description()
            metrics = MetricsFile(self.folder / "metrics.jsonl", resume_from=self.counters.step if resumed else None)
        logs = open_logs(self.options, self.manifest, self.folder)
        progress = RunProgress(
            self.task.verb, self.order.steps, self.counters.step, every=max(1, self.options.logging_steps)
        )
        try:
            with StopRequest() as stop:
                while self.counters.step < self.order.steps:
                    row = self.train_step(stop)
                    with writing(cannot_write):
                        metrics.write(row)
                    if row["step"] % max(1, self.options.logging_steps) == 0 or row["step"] == self.order.steps:
                        for log in logs:
                            log.write(row)
                    progress.advance(row["step"], _shown(row))
                    if self.counters.skipped_in_a_row >= MANY_BAD_STEPS:
                        self.give_up()
                    if self.options.save_steps > 0 and row["step"] % self.options.save_steps == 0:
                        self.save()
                    if stop.signal:
                        self.leave(stop.signal)
        finally:
            progress.close()
            metrics.close()
            for log in logs:
                log.close()
        with writing(f"--save_path {self.folder}: cannot write the model"):
            self.task.finish(self.model, self.folder)
            save_model(self.model, self.tokenizer, self.folder)

    def train_step(self, stop: StopRequest) -> dict:
        """One optimiser step and its row of metrics."""
        began = time.monotonic()
        step = self.counters.step
        random_before = random_state()
        samples = self.order.step_samples(step)
        batches = [batch.to(self.device.torch) for batch in self.task.micro_batches(samples)]
        totals = self.task.totals(batches)
        self.task.prepare(self.model, batches)
        figures: dict[str, torch.Tensor] = {}
        for batch in batches:
            share = self.task.loss(self.model, batch, totals)
            share.loss.backward()
            for name, value in share.figures.items():
                figures[name] = figures[name] + value if name in figures else value
            if stop.signal and batch is not batches[-1]:
                # The step is given up half-way: forget its gradients and its random numbers.
                self.optimiser.clear_gradients()
                restore_random_state(random_before)
                self.leave(stop.signal)
        learning_rate = self.optimiser.rate(step)
        if math.isfinite(figures["loss"]):
            report = self.optimiser.step(step)
        else:
            self.optimiser.clear_gradients()
            report = StepReport(math.nan, applied=False)
        self.counters.step += 1
        self.counters.tokens_seen += int(totals["tokens"])
        if report.applied:
            self.counters.skipped_in_a_row = 0
        else:
            self.counters.skipped_steps += 1
            self.counters.skipped_in_a_row += 1
        row = {
            "step": step + 1,
            "epoch": round((step + 1) / self.order.steps_per_epoch, 6),
            **{name: float(value) for name, value in figures.items()},
            "learning_rate": learning_rate,
            "grad_norm": report.grad_norm,
            "samples": len(samples),
            "micro_batches": len(batches),
            "tokens": int(totals["tokens"]),
            "trained_tokens": int(totals["trained_tokens"]),
            "skipped_steps": self.counters.skipped_steps,
        }
        seconds = time.monotonic() - began
        row |= {"seconds": seconds, "tokens_per_second": row["tokens"] / seconds}
        if self.evaluation_is_due(step):
            row |= self.evaluate()
        row["memory_gib"] = self.device.memory_gib()
        return row

    def evaluation_is_due(self, step: int) -> bool:
        if not self.task.evaluation_samples:
            return False
        last = step + 1 == self.order.steps
        if self.options.eval_steps > 0:
            return last or (step + 1) % self.options.eval_steps == 0
        return self.order.ends_epoch(step)

    def evaluate(self) -> dict[str, float]:
        """Every figure of the task over its evaluation set, a step's worth of samples at a time."""
        task, size = self.task, self.options.train_batch_size
        everything = list(range(task.evaluation_samples))
        groups = [
            task.micro_batches(everything[i : i + size], evaluation=True) for i in range(0, len(everything), size)
        ]
        totals = task.totals([batch for group in groups for batch in group])
        sums: dict[str, float] = {}
        with scoring(self.model):
            for group in groups:
                batches = [batch.to(self.device.torch) for batch in group]
                task.prepare(self.model, batches)
                for batch in batches:
                    for name, value in task.loss(self.model, batch, totals).figures.items():
                        sums[name] = sums.get(name, 0.0) + float(value)
        return {f"eval_{name}": value for name, value in sums.items()}

    def give_up(self) -> None:
        """Too many bad steps in a row: keep the last one's samples for a look, and stop."""
        step = self.counters.step
        samples = self.order.step_samples(step - 1)
        texts = [
            self.tokenizer.decode(batch.ids_T[span.rows()])
            for batch in self.task.micro_batches(samples)
            for span in batch.spans
        ]
        path = self.folder / "bad_batch.json"
        write_json(path, {"step": step, "samples": samples, "texts": texts})
        raise RunFailed(
            f"loss or gradient was not finite in {MANY_BAD_STEPS} steps in a row (last: step {step}); "
            f"the batch is in {path}; try a lower --learning_rate, or resume from the last checkpoint"
        )

    # ---- what is on disk

    def write_description(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "options.yaml").write_text(to_yaml(self.options))
        write_json(self.folder / "manifest.json", self.manifest)

    def save(self) -> Path | None:
        if self.options.disable_ds_ckpt and not self.options.save_hf_ckpt:
            return None
        step = self.counters.step
        export = None
        if self.options.save_hf_ckpt:
            export = lambda folder: save_model(self.model, self.tokenizer, folder)  # noqa: E731
        if self.options.disable_ds_ckpt:
            export(self.checkpoints.folder / f"global_step{step}_hf")
            return None
        randomness = random_state()
        tensors = self.optimiser.state()
        tensors |= {f"random/{k}": randomness.pop(k) for k in ("torch", "cuda") if k in randomness}
        state = {"counters": vars(self.counters), "random": randomness, "manifest": self.manifest}
        return self.checkpoints.save(step, tensors, state, export)

    def resume(self) -> bool:
        """Go on from the newest checkpoint, if there is one and it is this run's."""
        loaded = self.checkpoints.load()
        if loaded is None:
            print(f"no checkpoint in {self.checkpoints.folder}: starting from the beginning")
            return False
        tensors, state = loaded
        for line in compare(state["manifest"], self.manifest, self.checkpoints.latest()):
            print(f"warning: {line}")
        self.optimiser.restore(tensors)
        self.counters = Counters(**state["counters"])
        randomness = dict(state["random"])
        randomness |= {k: tensors[f"random/{k}"] for k in ("torch", "cuda") if f"random/{k}" in tensors}
        restore_random_state(randomness)
        print(f"resumed from {self.checkpoints.latest()} at step {self.counters.step}")
        return True

    def leave(self, signal_number: int) -> None:
        saved = self.save()
        where = f"checkpoint saved in {saved}; add --load_checkpoint to go on"
        if saved is None:
            where = "no checkpoint was written, as --disable_ds_ckpt asks"
        raise Interrupted(signal_number, f"stopped after step {self.counters.step}: {where}")


def _shown(row: dict) -> dict[str, str]:
    shown = {"loss": f"{row['loss']:.4f}"}
    if "eval_loss" in row:
        shown["eval"] = f"{row['eval_loss']:.4f}"
    shown |= {"tok/s": f"{row['tokens_per_second']:,.0f}", "mem": f"{row['memory_gib']:.1f} GiB"}
    if row["skipped_steps"] or not math.isfinite(row["grad_norm"]):
        shown["skipped"] = str(row["skipped_steps"])
    return shown
