"""From checked options to a run: device, tokenizer, data, model, then the loop. Or a rehearsal of all but the loop."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from trimtab.config.data import TemplateOptions
from trimtab.config.groups import LoggingOptions
from trimtab.config.jobs import SupervisedOptions
from trimtab.config.objectives import DistillationOptions, ReferenceOptions
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device, find_device
from trimtab.distributed.process_group import World, find_world, leave_world
from trimtab.distributed.random_state import process_seed, seed_everything
from trimtab.distributed.supervision import pulse
from trimtab.errors import UserError
from trimtab.files import check_folder
from trimtab.models.load import TrainedModelOptions
from trimtab.models.parallel.sharded_model import check_parallel_options, mesh_of
from trimtab.models.pretrained import check_model_folder, quiet_transformers
from trimtab.plan.micro_batches import (
    default_line,
    for_manifest,
    passes_of,
    uses_default_tokens,
    with_default_tokens,
    with_planned_passes,
    without_tokens,
)
from trimtab.plan.workload import Rows, Work
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.pass_limit import BeginAnew
from trimtab.train.rehearsal import memory_line, model_lines, samples_with_masks, usable_rows
from trimtab.train.supervised import SupervisedRun
from trimtab.train.task import Task

REHEARSED_ROWS = 256
Job = TypeVar("Job", bound=TrainedModelOptions)

MakeTask = Callable[[Any, Any], Task]  # (options, tokenizer)


def train(options: SupervisedOptions, make_task: MakeTask) -> None:
    device = find_device()
    try:
        world, carried = find_world(device), None
        while True:
            run = build_run(options, make_task, device, world)
            try:
                return run.train(carried)
            except BeginAnew:
                carried = run.carry()
            del run
            device.release_memory()
    finally:
        leave_world()


def build_run(options: SupervisedOptions, make_task: MakeTask, device: Device, world: World) -> SupervisedRun:
    """Everything up to the first step."""
    check_share(options, world.size)
    _check_places(options)
    tokenizer = load_job_tokenizer(options)
    if not world.leads:
        world.wait()  # the first process fills the token cache for all
    with pulse.waiting():  # reading the data takes as long as there are data
        task = make_task(options, tokenizer)
    if world.leads:
        world.wait()
    task.mesh = mesh = mesh_of(options, world)
    for line in [*task.data_lines(), *without_evaluation(options, task)]:
        world.say(line)
    options = with_default_tokens(options, device, saved_passes(options, world))
    options, memory_plan = with_planned_passes(options, device, world, lambda: supervised_work(task))
    task.options = options
    seed_everything(options.seed, deterministic=options.full_determinism)
    loaded = task.load_model(device)
    task.check_model(loaded.model)
    for line in (*notes(options, device), *loaded.notes):
        world.say(line)
    task.padded = loaded.verdict.path != "packed"
    if task.padded:
        world.say(f"samples are padded, not packed: {loaded.verdict.reason}")
    if uses_default_tokens(options, device):
        if task.padded:
            options = task.options = without_tokens(options)
        elif options.packing_samples:  # a run of an earlier version goes on without
            world.say(default_line(options))
    task.attach(loaded, device)
    # Dropout differs between processes that work on different tokens, everything else does not.
    seed_everything(process_seed(options.seed, mesh.gradients.rank), deterministic=options.full_determinism)
    described = {} if task.padded else for_manifest(memory_plan)
    described["passes"] = passes_of(options, packed=not task.padded)
    return SupervisedRun(options, task, loaded.model, tokenizer, device, loaded.weights, mesh, described=described)


def saved_passes(options: TrainedModelOptions, world: World) -> dict[str, int] | None:
    """How the run to resume cut its passes: earlier versions, which do not say it, by the number of samples. None:
    there is none to resume. Every process must ask."""
    if not options.load_checkpoint:
        return None
    found = None
    if world.leads:
        manifest = Checkpoints(Path(options.checkpoint_folder), keep=1, keep_gib=0).manifest()
        found = None if manifest is None else manifest.get("passes", {})
    return world.gather(found)[0]


def supervised_work(task: Task) -> Work:
    """Steps as they will come: the largest of them needs the most memory."""
    lengths, order = task.lengths(task.store), task.order()
    step = max(int(lengths[order.step_samples(step)].sum()) for step in range(order.steps))
    return Work(Rows(0, task.longest()), step, int(lengths.max()))


def rehearse(options: SupervisedOptions, make_task: MakeTask) -> list[str]:
    """Everything that can go wrong before the first step, on a few rows and without the weights."""
    device = find_device()
    _check_places(options)
    tokenizer = load_job_tokenizer(options)
    few = of_few_rows(options)
    task = make_task(few, tokenizer)
    model = task.skeleton()
    task.check_model(model)
    lines = [f"device: {device.name}", *notes(options, device), *model_lines(model, options, device)]
    samples, about = usable_rows(task.report, options.max_samples, task.samples)
    steps = dataclasses.replace(task.order(), samples=samples).steps
    lines.append(f"data: {task.report.in_files:,} rows give {'about ' if about else ''}{steps:,} steps")
    lines += samples_with_masks(task.make_batch(task.store, [0]), tokenizer)
    if model.path == "packed" and uses_default_tokens(options, device):
        options = with_default_tokens(options, device)
        lines.append(default_line(options))
    lines.append(memory_line(options, device, lambda: supervised_work(task)))
    return lines


def of_few_rows(options: Job) -> Job:
    """The same job on the first rows of its data."""
    few: dict[str, Any] = {
        "max_samples": min(options.max_samples, REHEARSED_ROWS),
        "eval_max_samples": min(options.eval_max_samples or REHEARSED_ROWS, REHEARSED_ROWS),
    }
    return dataclasses.replace(options, **few)


def _check_places(options: SupervisedOptions) -> None:
    """Before anything slow: is the model there, can it be split as asked, and can its successor be written?"""
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


def check_output_folders(options: TrainedModelOptions) -> None:
    folders: dict[str, str | None] = {"save_path": options.save_path, "ckpt_path": options.ckpt_path}
    folders |= {"use_tensorboard": options.use_tensorboard, "use_visualdl": options.use_visualdl}
    for flag, place in folders.items():
        if place:
            check_folder(flag, Path(place))


def load_job_tokenizer(options: TrainedModelOptions) -> PreTrainedTokenizerBase:
    quiet_transformers()
    return load_tokenizer(
        options.pretrain,
        disable_fast=options.disable_fast_tokenizer,
        chat_template=options.tokenizer_chat_template if isinstance(options, TemplateOptions) else None,
    )


def check_share(options: TrainedModelOptions, processes: int, *, learns: bool = True) -> None:
    """Whether so many processes can hold a model. Launchers start processes without telling the options."""
    if options.load_in_4bit and processes > 1:
        raise UserError("--load_in_4bit: 4-bit weights cannot be split; train in one process")
    options.mesh_sizes(processes, learns=learns)


def without_evaluation(options: LoggingOptions, task: Task) -> list[str]:
    """Whether the data hold a test split is known only when they are read."""
    if task.evaluation_samples:
        return []
    names = ("eval_steps", "eval_max_samples")
    return [f"warning: {line}" for line in options.idle(names, "without --eval_dataset, or a test split in the data")]


def notes(options: TrainedModelOptions, device: Device) -> list[str]:
    notes = []
    if options.bf16 and not device.has_fast_bf16():
        notes.append("note: this CPU has no fast bfloat16; fp32 (without --bf16) is about twice as fast here")
    if options.offload_activations and not device.is_accelerator:
        notes.append("note: --offload_activations has no effect here: activations are in main memory already")
    if options.full_determinism and not device.is_accelerator and torch.get_num_threads() > 1:
        notes.append("note: results repeat bit for bit with the same number of threads")
    return notes
