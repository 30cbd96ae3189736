"""The checks of a supervised run before its first step (proof.py), and of its files in `trimtab check`."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.data.batches import TokenBatch
from trimtab.distributed.process_group import reinit_process_group
from trimtab.errors import OutOfMemory
from trimtab.interrupts import StopRequest
from trimtab.train.checkpoint import Checkpoints, HostTensors, ShardedTensors
from trimtab.train.proof import (
    SAMPLES,
    SHORT,
    TRIALS,
    Check,
    CheckResult,
    Proof,
    TrialUpdate,
    check_export,
    check_overlap,
    check_rendering,
    compare_resumed,
)
from trimtab.train.run_directory import scratch_folder
from trimtab.train.task import SupervisedTask
from trimtab.train.update import ChecksTooLarge, LossTerm, RebuildModels, memory_guard


def data_checks(task: SupervisedTask, tokenizer: PreTrainedTokenizerBase) -> dict[str, Check]:
    """The checks that need no weights."""
    examples, row = task.first_row()
    truncated = task.report.rows_truncated / max(task.report.rows_kept, 1)
    return {
        "data": lambda: check_overlap(task.evaluation_report, truncated),
        "rendering": lambda: worst(check_rendering(one, row, tokenizer, task.options.max_len) for one in examples),
    }


def worst(results: Iterable[CheckResult]) -> CheckResult:
    return max(results, key=lambda result: (result.failed, bool(result.problem)))


def prove_supervised(run: Any) -> None:
    """Run the checks of a SupervisedRun that precede the first step. UserError: one has failed."""
    options, task, order = run.options, run.task, run.order
    proof, lengths = Proof(options, run.mesh.world.say, run.mesh.all.any), task.lengths(task.store)
    proof.run(data_checks(task, run.tokenizer))
    first = order.step_samples(0)
    step = [i for i in first if task.teaches(task.store, i)] or first
    samples = sorted(step, key=lambda i: int(lengths[i]))[:SAMPLES]
    most = max(int(lengths[part].sum()) for part in task.cut(task.store, step))
    while len(samples) > 2 and lengths[samples].sum() > most:  # a row needs no more memory than the run's
        samples.pop()
    if names := [name for name in TRIALS if options.wants_check(name)]:
        planned = order.steps * order.batch_size * float(lengths.mean()) / float(lengths[samples].sum())
        try:
            with memory_guard():
                proof.try_update(names, trial_of(run, samples).run, planned)
        except OutOfMemory:  # in one process, and so in all; the run finds micro-batches that fit
            proof.leave_out(names, SHORT)
            run.device.release_memory()
            reinit_process_group(run.mesh.world)
            if run.mesh.size > 1:  # sharded models must be rebuilt
                proof.conclude()
                if options.check_only:
                    return
                raise ChecksTooLarge from None
    if options.check_only:
        weights = 4 * sum(parameter.numel() for parameter in run.model.parameters())
        with scratch_folder(options, run.optimizer.state_bytes + weights, run.mesh.world) as folder:
            if folder is None:
                proof.leave_out(["checkpoint", "export"], "no room on the disk of --ckpt_path")
            else:
                run.checkpoints = Checkpoints(folder / "checkpoints", keep=1, keep_gib=1e9, world=run.mesh.world)
                try:
                    proof.run({"checkpoint": partial(check_resume, run), "export": partial(check_saved, run, folder)})
                except RebuildModels:  # of several processes: a run goes on with smaller micro-batches
                    proof.leave_out(["checkpoint", "export"], SHORT)
    proof.conclude()


def trial_of(run: Any, samples: list[int]) -> TrialUpdate:
    """A trial of the update on these samples."""
    task, options = run.task, run.options

    def make(parts: list[list[int] | None]) -> tuple[list[TokenBatch], Callable[[TokenBatch], LossTerm]]:
        chosen = [samples[:1] if part is None else [samples[i] for i in part] for part in parts]
        batches = [task.make_batch(task.store, part).to(run.device.torch) for part in chosen]
        for part, batch in zip(parts, batches):
            batch.weight = 0.0 if part is None else 1 / run.mesh.data_size
        task.prepare(run.model, batches)
        totals = task.totals([batch for batch in batches if batch.weight])
        return batches, lambda batch: task.loss(run.model, batch, totals)

    fake = task.skeleton if options.lora_rank == 0 else None
    how = {"balanced": options.aux_loss_coef > 0, "bf16": options.bf16 or options.load_in_4bit}
    return TrialUpdate(run.model, run.optimizer, run.mesh, len(samples), make, run.accumulate, fake=fake, **how)


def check_resume(run: Any) -> CheckResult | None:
    """Save after a step and go on; then resume and repeat. The run cannot train afterwards."""
    if run.options.disable_ds_ckpt:
        return None
    with StopRequest() as stop:
        run.update(stop)
        run.save(export=False)
        saved, step = ShardedTensors(run.checkpoints.latest()), run.counters.step
        wrong = saved.differing(run.optimizer.state())
        run.update(stop)
        after = HostTensors(run.optimizer.state())
        run.resume()
        wrong, resumed = [*wrong, *saved.differing(run.optimizer.state())], run.counters.step
        run.update(stop)
    # Kernels of an accelerator may sum in another order.
    repeated = [] if run.device.is_accelerator else after.differing(run.optimizer.state())
    found = [sorted({name for part in run.mesh.all.gather(names) for name in part}) for names in (wrong, repeated)]
    return compare_resumed(step, resumed, *found)


def check_saved(run: Any, folder: Path) -> CheckResult | None:
    """The model as --save_path would hold it, read by transformers."""
    if run.options.load_in_4bit:
        return None
    run.task.finish(run.model, folder)
    run.save_model(folder)
    batch = run.task.make_batch(run.task.store, [int(run.task.lengths(run.task.store).argmin())]).to(run.device.torch)
    return check_export(folder, run.options.pretrain, run.model, batch, run.mesh, bf16=run.options.bf16)
