"""The supervised loop, shared by all jobs that train on a fixed dataset.

    for every step: take its samples, split them into micro-batches, accumulate gradients, step, log, evaluate, save

A step's samples, learning rate and random state depend only on its number and the last checkpoint, so a run that was
killed and resumed equals an uninterrupted one. The task defines the loss (task.py).
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab.config.jobs import SupervisedOptions
from trimtab.config.objective_options import DistillationOptions, ReferenceOptions
from trimtab.config.training_options import LoggingOptions
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import Device, find_device
from trimtab.distributed.fsdp import GRADIENT_DTYPES
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import World, deal, find_world, leave_world, reinit_process_group
from trimtab.distributed.random_state import process_seed, random_state, restore_random_state, seed_everything
from trimtab.distributed.supervision import own_heartbeat
from trimtab.errors import CannotWrite, Interrupted, RunFailed, UserError
from trimtab.files import write_json, writing
from trimtab.interrupts import StopRequest
from trimtab.models.packed import PackedModel, scoring
from trimtab.models.parallel.sharded_model import check_parallel_options, mesh_of
from trimtab.models.pretrained import check_model_folder
from trimtab.models.routing import counted_experts
from trimtab.models.save import save_model
from trimtab.plan.workload import RowShape, Work
from trimtab.train.alarms import diverged_line, not_finite_line, resume_line
from trimtab.train.checkpoint import (
    Checkpoints,
    HostTensors,
    ShardedTensors,
    all_finite,
    reading_checkpoint,
    write_sharded,
)
from trimtab.train.launch import (
    check_output_folders,
    check_processes,
    default_line,
    device_notes,
    estimate_samples,
    for_manifest,
    load_job_tokenizer,
    memory_line,
    micro_batch_sizes,
    model_lines,
    samples_with_masks,
    saved_passes,
    uses_default_tokens,
    with_default_tokens,
    with_few_rows,
    with_planned_micro_batches,
    without_tokens,
)
from trimtab.train.layer_compilation import SupervisedCompilation
from trimtab.train.metrics import RunLog
from trimtab.train.optimizer import Optimizer
from trimtab.train.proof import prove_without_weights
from trimtab.train.run_directory import (
    RunDirectory,
    SpaceWatch,
    compare_manifests,
    learning_settings,
    make_manifest,
    names_fingerprint,
)
from trimtab.train.supervised_proof import data_checks, prove_supervised
from trimtab.train.supervised_tasks import DPOTask, KDTask, KTOTask, PRMTask, RMTask, SFTTask
from trimtab.train.task import SupervisedTask
from trimtab.train.update import (
    MEMORY_FLAGS,
    ChecksTooLarge,
    LossTerm,
    MicroBatchLimit,
    RebuildModels,
    Totals,
    accumulate,
    memory_guard,
    retry_smaller,
    undo_step,
)

MANY_BAD_STEPS = 5  # in a row: the run stops
NO_ROOM = 256  # a value outside the signal numbers: a process could not write


@dataclass
class SupervisedCounters:
    """The loop's state besides weights; saved in every checkpoint."""

    step: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0

    def count(self, applied: bool) -> None:
        self.step += 1
        self.skipped_steps += not applied
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1


@dataclass
class SupervisedRun:
    """One supervised run in this process: the loop, evaluation, checkpoints and recovery from out-of-memory."""

    options: SupervisedOptions
    task: SupervisedTask
    model: PackedModel
    tokenizer: PreTrainedTokenizerBase
    device: Device
    weights: str  # fingerprint of the initial weights
    mesh: Mesh = field(default_factory=Mesh)  # all processes of the run
    counters: SupervisedCounters = field(default_factory=SupervisedCounters)
    described: dict[str, Any] = field(default_factory=dict)  # further entries of the manifest
    pending: dict | None = None  # row of a step that is done except for its evaluation

    def __post_init__(self):
        options, task = self.options, self.task
        self.folder = Path(options.save_path)
        self.order = task.order()
        self.optimizer = Optimizer(
            self.model.model,
            options,
            self.order.steps,
            learning_rate=options.learning_rate,
            fused=self.device.fused_adam(),
            gradient_dtype=GRADIENT_DTYPES[options.grad_accum_dtype],
            offload=options.adam_offload,
        )
        self.compiling = SupervisedCompilation(options, self.device, self.mesh)
        self.checkpoints = Checkpoints(
            Path(options.checkpoint_folder),
            keep=options.max_ckpt_num,
            keep_gib=options.max_ckpt_mem,
            world=self.mesh.world,
            run=self.folder,
        )
        self.manifest = make_manifest(
            job=task.verb,
            weights=self.weights,
            data_order=self.order.fingerprint(task.data_fingerprint),
            seed=options.seed,
            dtype="bfloat16" if options.bf16 else "float32",
            device=self.device.described(),
            path=self.model.path,
            not_exact=self.model.not_exact,
            model=options.pretrain,
            trainable=names_fingerprint(self.optimizer.working),
            parameters=sum(p.numel() for p in self.model.parameters()),
            trainable_parameters=sum(p.numel() for p in self.optimizer.working.values()),
            steps=self.order.steps,
            settings=learning_settings(options),
            processes=self.mesh.size,
            layout=self.mesh.sizes,
            zero_stage=options.zero_stage,
            data=task.describe_data(),
            **self.described,
        )
        self.run_directory = RunDirectory(options, self.manifest, self.mesh.world)

    # ---- the loop

    def train(self, carried: tuple | None = None) -> None:
        """Run to the end; `carried`: the result of `carry` of the same run before its models were rebuilt."""
        if carried is None:
            prove_supervised(self)
            if self.options.check_only:
                return
        with self.run_directory.locked():
            resumed = carried is not None or (self.options.load_checkpoint and self.resume())
            if carried is not None:
                self.take_over(*carried)
            self.manifest["compiled"] = self.compiling.settle(self.model, self.optimizer, self.task)
            if self.mesh.is_rank_zero:
                self.run_directory.describe()
            log = self.open_log(resumed) if self.mesh.is_rank_zero else None
            try:
                with StopRequest() as stop:
                    self.run_steps(log, stop)
                    # Inside, so that a signal does not interrupt the writing of the finished model.
                    self.conclude()
            finally:
                if log is not None:
                    log.close()

    def run_steps(self, log: RunLog | None, stop: StopRequest) -> None:
        while self.counters.step < self.order.steps or self.pending is not None:
            row = self.train_step(stop)
            problem = None if log is None else self.attempt(partial(log.write, row))
            if self.counters.skipped_in_a_row >= MANY_BAD_STEPS:
                self.give_up()
            signal = self.mesh.all.maximum(NO_ROOM if problem else stop.signal or 0)
            if signal == NO_ROOM:
                self.on_write_error(problem)
            if self.options.save_steps > 0 and row["step"] % self.options.save_steps == 0:
                self.on_write_error(self.attempt(self.save))
            if signal and self.counters.step < self.order.steps:
                self.leave(signal)

    def conclude(self) -> None:
        def write_results() -> None:
            with writing(f"--save_path {self.folder}: cannot write the model"):
                self.task.finish(self.model, self.folder)
                self.save_model(self.folder)

        self.check_finite(self.optimizer.masters.values())
        self.on_write_error(self.attempt(write_results))
        self.run_directory.finish()
        if self.counters.skipped_in_a_row:
            raise RunFailed(diverged_line(self.counters.skipped_in_a_row, "steps", self.folder))

    @staticmethod
    def attempt(write: Callable[[], object]) -> str | None:
        """Call `write`; returns the disk error as text, or None."""
        try:
            write()
        except CannotWrite as error:
            return str(error)
        return None

    def on_write_error(self, problem: str | None) -> None:
        """End the run if one of its processes could not write, after saving a checkpoint on any disk with space."""
        failure = next((found for found in self.mesh.all.gather(problem) if found), None)
        if failure is not None:
            raise UserError(f"{failure}; {self.checkpoints.rescue(*self.checkpoint())}")

    def train_step(self, stop: StopRequest) -> dict:
        """One optimizer step and, if due, an evaluation; returns the row of metrics."""
        if self.pending is None:
            if self.compiling.look(self.model, self.task):
                self.manifest["compiled"] = self.compiling.decided
            self.pending = self.update(stop)
        row = self.pending
        if self.evaluation_is_due(row["step"] - 1):
            row |= self.evaluate()
        row["memory_gib"] = self.device.memory_gib()
        self.pending = None
        return row

    def update(self, stop: StopRequest) -> dict:
        """One optimizer step; returns its row of metrics."""
        began = time.monotonic()
        step = self.counters.step
        samples = self.order.step_samples(step)
        figures, totals, passes = retry_smaller(
            lambda: self.accumulate_gradients(samples, stop), lambda why: self.shrink(samples, why)
        )
        learning_rate = self.optimizer.rate(step)
        report = self.optimizer.step(step, finite=math.isfinite(figures["loss"]))
        self.counters.count(report.applied)
        row = {
            "step": step + 1,
            "epoch": round((step + 1) / self.order.steps_per_epoch, 6),
            **figures,
            "learning_rate": learning_rate,
            "grad_norm": report.grad_norm,
            "samples": len(samples),
            "micro_batches": passes * self.mesh.data_size,
            "tokens": int(totals["tokens"]),
            "trained_tokens": int(totals["trained_tokens"]),
            "skipped_steps": self.counters.skipped_steps,
            **self.task.micro_batch_limit.columns(),
        }
        seconds = time.monotonic() - began
        return row | self.compiling.columns() | {"seconds": seconds, "tokens_per_second": row["tokens"] / seconds}

    def accumulate_gradients(self, samples: list[int], stop: StopRequest) -> tuple[dict[str, float], Totals, int]:
        """Forward and backward of all micro-batches of a step. Returns figures and totals over all processes, and the
        number of micro-batches in this one."""
        undo = undo_step(self.optimizer)

        def until_stopped() -> Iterator[TokenBatch]:
            for batch in batches:
                yield batch
                if stop.signal and batch is not batches[-1] and self.mesh.size == 1:
                    undo()
                    self.leave(stop.signal)

        with memory_guard(undo):
            batches = self.make_batches(self.task.cut(self.task.store, samples))
            totals = self.totals(batches)
            self.task.prepare(self.model, batches)
            figures = self.accumulate(until_stopped(), len(batches), lambda b: self.task.loss(self.model, b, totals))
            return figures, totals, len(batches)

    def accumulate(
        self, batches: Iterable[TokenBatch], count: int, share: Callable[[TokenBatch], LossTerm]
    ) -> dict[str, float]:
        """Add the gradients of these micro-batches; returns their figures over all processes."""
        with counted_experts(self.model) as load:
            figures = accumulate(self.model, self.mesh, batches, count, share)
        return self.mesh.data.add_up(figures | load.figures(self.mesh.data))

    def shrink(self, samples: list[int], why: str, *, evaluation: bool = False) -> None:
        """Halve the micro-batch limit after out-of-memory on these samples, or end the run if it cannot be halved."""
        task, limit = self.task, self.task.micro_batch_limit
        self.device.release_memory()
        reinit_process_group(self.mesh.world)
        store = task.evaluation if evaluation else task.store
        lengths = task.lengths(store)
        passes = [(int(lengths[part].sum()), len(part)) for part in task.cut(store, samples)]
        if limit.halve(passes, by_tokens=task.packs):
            self.mesh.world.say(
                f"out of memory in step {self.counters.step + 1}: begun anew in passes of at most {limit}"
            )
            if self.mesh.size > 1:
                raise RebuildModels
            return
        # In an evaluation the step is counted but its row is not written yet, so the previous checkpoint is the right
        # one. After out-of-memory, sharded weights can be saved as shards but no longer gathered.
        saved = self.checkpoints.latest() if evaluation else self.save(export=self.mesh.size == 1)
        where = f"go on from {saved} with --load_checkpoint" if saved else "nothing was saved"
        raise RunFailed(
            f"a pass of one sample, at most {int(lengths[samples].max()):,} tokens, does not fit into memory ({why}); "
            f"lower --max_len; {MEMORY_FLAGS}; {where}"
        )

    def make_batches(self, cut: list[list[int]], *, evaluation: bool = False) -> list[TokenBatch]:
        """This process's micro-batches of a step; every process has the same number."""
        store = self.task.evaluation if evaluation else self.task.store
        if self.mesh.data_size > 1:
            lengths = self.task.lengths(store)
            shares = deal(cut, self.mesh.data_size, lambda part: int(lengths[part].sum()))
            cut_here = [part or [] for part in shares[self.mesh.data.rank]]
        else:
            cut_here = cut
        batches = []
        for part in cut_here:
            # With fewer samples than processes, some take part in the collectives with a sample of weight 0.
            batch = self.task.make_batch(store, part or cut[0][:1]).to(self.device.torch)
            batch.weight = 1.0 if part else 0.0
            batches.append(batch)
        return batches

    def totals(self, batches: list[TokenBatch]) -> dict[str, float]:
        """Denominators of the step's means, summed over all processes."""
        here = self.task.totals([batch for batch in batches if batch.weight])
        return self.mesh.data.add_up({k: torch.tensor(float(v), device=self.device.torch) for k, v in here.items()})

    def evaluation_is_due(self, step: int) -> bool:
        if not self.task.evaluation_samples:
            return False
        last = step + 1 == self.order.steps
        if self.options.eval_steps > 0:
            return last or (step + 1) % self.options.eval_steps == 0
        return last or self.order.ends_epoch(step)

    def evaluate(self) -> dict[str, float]:
        """Figures of the task over its evaluation set, one batch of --train_batch_size at a time."""
        everything = list(range(self.task.evaluation_samples))
        shrink = partial(self.shrink, everything, evaluation=True)
        return retry_smaller(lambda: self.figures_of(everything), shrink)

    def figures_of(self, everything: list[int]) -> dict[str, float]:
        task, size = self.task, self.options.train_batch_size
        cuts = [task.cut(task.evaluation, everything[i : i + size]) for i in range(0, len(everything), size)]
        groups = [self.make_batches(cut, evaluation=True) for cut in cuts]
        totals = self.totals([batch for group in groups for batch in group])
        figures: dict[str, Tensor] = {}
        with memory_guard(), scoring(self.model):
            while groups:
                batches = groups.pop(0)
                task.prepare(self.model, batches)
                for batch in batches:
                    task.loss(self.model, batch, totals).add_to(figures, batch.weight)
            return {f"eval_{name}": value for name, value in self.mesh.data.add_up(figures).items()}

    def give_up(self) -> None:
        """Stop after too many non-finite steps in a row; bad_batch.json gets the samples of the last one."""
        step = self.counters.step
        samples = self.order.step_samples(step - 1)
        batch = self.task.make_batch(self.task.store, samples)
        texts = [self.tokenizer.decode(batch.sequence(i)) for i in range(len(batch.spans))]
        path = self.folder / "bad_batch.json"
        places = self.task.places(samples)
        if self.mesh.is_rank_zero:
            write_json(path, {"step": step, "rows": places, "texts": texts})
        raise RunFailed(
            f"loss or gradient was not finite in {MANY_BAD_STEPS} steps in a row (last: step {step}); "
            f"its {len(places)} rows, such as {places[0]}, are in {path}; "
            "try a lower --learning_rate, or resume from the last checkpoint"
        )

    def check_finite(self, tensors: Iterable[Tensor]) -> None:
        """Raise before weights that are not finite overwrite a good model or checkpoint."""
        if not all(self.mesh.all.gather(all_finite(tensors))):
            raise RunFailed(not_finite_line(f"after step {self.counters.step}", self.checkpoints.latest()))

    # ---- files

    def open_log(self, resumed: bool) -> RunLog:
        trained = self.manifest["trainable_parameters"]
        model = trained * (2 if self.options.bf16 else 4)
        return RunLog(
            self.options,
            self.manifest,
            self.folder,
            verb=self.task.verb,
            total=self.order.steps,
            start=self.counters.step,
            resumed=resumed,
            space=SpaceWatch(self.options, model=model, checkpoint=self.optimizer.state_bytes),
        )

    def save_model(self, folder: Path) -> None:
        save_model(self.model, self.tokenizer, folder, mesh=self.mesh, bf16=self.options.bf16)

    def checkpoint(self) -> tuple[int, Callable[[Path], None], dict]:
        """Step, function that writes the tensors, and state of a checkpoint."""
        step, tensors = self.counters.step, self.optimizer.state()
        self.check_finite(tensors.values())
        state = {
            "counters": vars(self.counters),
            "pass_limit": vars(self.task.micro_batch_limit),
            "compiled": self.compiling.decided,
            "random": self.mesh.gradients.gather(random_state()),  # ranks of a tensor-parallel group have equal streams
            "manifest": self.manifest,
        }
        return step, lambda folder: write_sharded(folder, tensors, self.mesh, step), state

    def save(self, *, export: bool = True) -> Path | None:
        """Save a checkpoint; `export`: with --save_hf_ckpt, export the model too."""
        step, write, state = self.checkpoint()
        models = self.save_model if export and self.options.save_hf_ckpt else None
        if not self.options.disable_ds_ckpt:
            return self.checkpoints.save(step, write, state, models)
        if models is not None:
            self.checkpoints.export_only(step, models)
        return None

    def resume(self) -> bool:
        """Load the newest checkpoint; False if there is none. UserError: it belongs to another run."""
        loaded = self.checkpoints.load()
        if loaded is None:
            self.mesh.world.say(f"no checkpoint in {self.checkpoints.folder}: starting from the beginning")
            return False
        path, state = loaded
        for line in compare_manifests(state["manifest"], self.manifest, path):
            self.mesh.world.say(f"warning: {line}")
        with reading_checkpoint(path):
            self.optimizer.restore(ShardedTensors(path))
            self.counters = SupervisedCounters(**state["counters"])
            self.task.micro_batch_limit = MicroBatchLimit(**state["pass_limit"])
            self.compiling.decided = state["compiled"]
            self.restore_generators(state["random"])
        if not self.options.check_only:
            self.mesh.world.say(f"resumed from {path} at step {self.counters.step}")
        return True

    def restore_generators(self, states: list[dict]) -> None:
        """Restore the random streams; with another number of processes, seed new ones."""
        places = self.mesh.gradients
        if len(states) == places.size:
            restore_random_state(states[places.rank])
        else:
            seed_everything(process_seed(self.options.seed, places.rank, self.counters.step))

    def carry(self) -> tuple:
        """This process's state for a run whose models are rebuilt: tensors, random state, and the loop's state."""
        known = (self.counters, self.task.micro_batch_limit, self.pending, self.compiling.decided)
        return HostTensors(self.optimizer.state()), random_state(), known

    def take_over(self, tensors: HostTensors, random: dict, known: tuple) -> None:
        self.optimizer.restore(tensors)
        restore_random_state(random)
        self.counters, self.task.micro_batch_limit, self.pending, self.compiling.decided = known

    def leave(self, signal_number: int) -> None:
        if not self.checkpoints.saved(self.counters.step):
            self.on_write_error(self.attempt(self.save))
        where = resume_line(self.checkpoints.saved(self.counters.step))
        raise Interrupted(signal_number, f"stopped after step {self.counters.step}: {where}")


# ---- from checked options to a run

TASKS: dict[str, type[SupervisedTask]] = {
    "sft": SFTTask,
    "kd": KDTask,
    "rm": RMTask,
    "prm": PRMTask,
    "dpo": DPOTask,
    "kto": KTOTask,
}
MakeTask = Callable[[Any, Any], SupervisedTask]  # (options, tokenizer)


def train_supervised(options: SupervisedOptions) -> None:
    device = find_device()
    try:
        world, carried = find_world(device), None
        while True:
            run = build_run(options, TASKS[options.verb], device, world)
            try:
                return run.train(carried)
            except ChecksTooLarge:
                options = dataclasses.replace(options, skip_checks="all")
            except RebuildModels:
                carried = run.carry()
            del run
            device.release_memory()
    finally:
        leave_world()


def build_run(options: SupervisedOptions, make_task: MakeTask, device: Device, world: World) -> SupervisedRun:
    """Check, load data and model, and create the run, up to the first step."""
    check_processes(options, world.size)
    _check_places(options)
    tokenizer = load_job_tokenizer(options)
    if not world.is_rank_zero:
        world.wait()  # rank 0 fills the token cache for all
    with own_heartbeat.waiting():  # reading the data has no time limit
        task = make_task(options, tokenizer)
    if world.is_rank_zero:
        world.wait()
    task.mesh = mesh = mesh_of(options, world)
    for line in [*task.data_lines(), *without_evaluation(options, task)]:
        world.say(line)
    options = with_default_tokens(options, device, saved_passes(options, world))
    options, memory_plan = with_planned_micro_batches(options, device, world, lambda: supervised_work(task))
    task.options = options
    seed_everything(options.seed, deterministic=options.full_determinism)
    loaded = task.load_model(device)
    task.check_model(loaded.model)
    for line in (*device_notes(options, device), *loaded.notes):
        world.say(line)
    task.padded = loaded.verdict.path != "packed"
    if task.padded:
        world.say(f"samples are padded, not packed: {loaded.verdict.reason}")
    if uses_default_tokens(options, device):
        if task.padded:
            options = task.options = without_tokens(options)
        elif options.packing_samples:  # False in a run resumed from a version without it
            world.say(default_line(options))
    task.attach(loaded, device)
    # Only dropout may differ between processes, and only between those that work on different tokens.
    seed_everything(process_seed(options.seed, mesh.gradients.rank), deterministic=options.full_determinism)
    described = {} if task.padded else for_manifest(memory_plan)
    described["passes"] = micro_batch_sizes(options, packed=not task.padded)
    return SupervisedRun(options, task, loaded.model, tokenizer, device, loaded.weights, mesh, described=described)


def supervised_work(task: SupervisedTask) -> Work:
    """The workload for the memory plan: the step with the most tokens."""
    lengths, order = task.lengths(task.store), task.order()
    step = max(int(lengths[order.step_samples(step)].sum()) for step in range(order.steps))
    return Work(RowShape(0, task.longest()), step, int(lengths.max()))


def dry_run_supervised(options: SupervisedOptions) -> list[str]:
    """Run all checks that precede the first step, on a few rows and without weights; returns the lines to print."""
    device = find_device()
    _check_places(options)
    tokenizer = load_job_tokenizer(options)
    few = with_few_rows(options)
    task = TASKS[options.verb](few, tokenizer)
    model = task.skeleton()
    task.check_model(model)
    lines = [f"device: {device.name}", *device_notes(options, device), *model_lines(model, options, device)]
    samples, about = estimate_samples(task.report, options.max_samples, task.samples)
    steps = dataclasses.replace(task.order(), samples=samples).steps
    lines.append(f"data: {task.report.in_files:,} rows give {'about ' if about else ''}{steps:,} steps")
    lines += samples_with_masks(task.make_batch(task.store, [0]), tokenizer)
    lines += prove_without_weights(options, data_checks(task, tokenizer))
    if model.path == "packed" and uses_default_tokens(options, device):
        options = with_default_tokens(options, device)
        lines.append(default_line(options))
    lines.append(memory_line(options, device, lambda: supervised_work(task)))
    return lines


def without_evaluation(options: LoggingOptions, task: SupervisedTask) -> list[str]:
    """Warnings for evaluation options without evaluation data, which is known only after the data were read."""
    if task.evaluation_samples:
        return []
    names = ("eval_steps", "eval_max_samples")
    return [f"warning: {line}" for line in options.idle(names, "without --eval_dataset, or a test split in the data")]


def _check_places(options: SupervisedOptions) -> None:
    """Check that the models exist, that they can be split as asked, and that the output folders can be written."""
    models: dict[str, str | None] = {"pretrain": options.pretrain}
    if isinstance(options, ReferenceOptions):
        models["ref_pretrain"] = options.ref_pretrain
    if isinstance(options, DistillationOptions):
        models["teacher_model"] = options.teacher_model
    for flag, name in models.items():
        if name:
            check_model_folder(name, f"--{flag}")
            check_parallel_options(name, options, f"--{flag}")
    check_output_folders(options)
