"""Set-up that all training jobs share: tokenizer, output folders, device, model, gc, default token budgets of
micro-batches; and the lines of --dry_run.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trimtab.config.data_options import TemplateOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.config.training_options import PASS_SIZES, PER_DEVICE
from trimtab.data.batches import TokenBatch
from trimtab.data.dataset import DataReport
from trimtab.data.prompts import PromptDataset
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device
from trimtab.distributed.process_group import World
from trimtab.errors import UserError
from trimtab.files import check_folder
from trimtab.models.load import TrainedModelOptions
from trimtab.models.packed import PackedModel
from trimtab.models.parallel.sharded_checkpoint import resolve_path
from trimtab.models.parallel.tensor_parallel import supports_tensor_parallel
from trimtab.models.pretrained import first_line, quiet_transformers
from trimtab.plan.hardware import GIB, ClusterHardware, Hardware, of_device, shared
from trimtab.plan.workload import TOKENS_ON_CPU, Work, budget_changes, packs_by_tokens, rl_work, supposed
from trimtab.train.checkpoint import Checkpoints

if TYPE_CHECKING:
    from trimtab.plan.planner import Plan

REHEARSED_ROWS = 256
Job = TypeVar("Job", bound=TrainedModelOptions)


def saved_passes(options: TrainedModelOptions, world: World) -> dict[str, int] | None:
    """The micro-batch limits stored in the checkpoint to resume from. All processes must call it.

    {}: an older checkpoint that stores none, which means a limit by samples. None: nothing to resume.
    """
    if not options.load_checkpoint:
        return None
    found = None
    if world.is_rank_zero:
        manifest = Checkpoints(Path(options.checkpoint_folder), keep=1, keep_gib=0).manifest()
        found = None if manifest is None else manifest.get("passes", {})
    return world.gather(found)[0]


def with_few_rows(options: Job) -> Job:
    """The same job on the first rows of its data."""
    few: dict[str, Any] = {
        "max_samples": min(options.max_samples, REHEARSED_ROWS),
        "eval_max_samples": min(options.eval_max_samples or REHEARSED_ROWS, REHEARSED_ROWS),
    }
    return dataclasses.replace(options, **few)


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


def check_processes(options: TrainedModelOptions, processes: int, *, learns: bool = True) -> None:
    """Raise UserError if the model cannot be split over `processes`, which an outside launcher may have chosen."""
    if options.load_in_4bit and processes > 1:
        raise UserError("--load_in_4bit: 4-bit weights cannot be split; train in one process")
    options.mesh_sizes(processes, learns=learns)


def device_notes(options: TrainedModelOptions, device: Device) -> list[str]:
    notes = []
    if options.bf16 and not device.has_fast_bf16():
        notes.append("note: this CPU has no fast bfloat16; fp32 (without --bf16) is about twice as fast here")
    if options.offload_activations and not device.is_accelerator:
        notes.append("note: --offload_activations has no effect here: activations are in main memory already")
    if options.full_determinism and not device.is_accelerator and torch.get_num_threads() > 1:
        notes.append("note: results repeat bit for bit with the same number of threads")
    return notes


# ---- lines of a dry run


SHOWN = 600  # characters of a sample


def with_mask(ids: np.ndarray, trained: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text in one line, with the tokens that carry loss in double brackets."""
    cuts = [0, *(np.flatnonzero(np.diff(trained.astype(np.int8))) + 1).tolist(), len(ids)]
    text = ""
    for start, end in itertools.pairwise(cuts):
        piece = one_line(tokenizer.decode(ids[start:end]))
        text += f"[[{piece}]]" if trained[start] else piece
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"


def one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def samples_with_masks(batch: TokenBatch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A line for each sequence of the first sample."""
    lines = []
    for span in batch.spans:
        rows = torch.from_numpy(span.rows())
        shown = with_mask(batch.ids_T[rows].numpy(), batch.trained_T[rows].numpy(), tokenizer)
        lines.append(f"first sample, [[what is learnt]]: {shown}")
    return lines


def model_lines(model: PackedModel, options: TrainedModelOptions, device: Device) -> list[str]:
    """How a fake model would be run: its size, packed or padded rows, and the ways to split it over processes."""
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    lines = [f"model: {type(model.inner).__name__}, {parameters:,} parameters, {trained:,} trained"]
    verdict = resolve_path(model, options, device)
    packed = verdict.path == "packed"
    lines.append("rows: packed" if packed else f"rows: padded, not packed: {verdict.reason}")
    sizes = [str(size) for size in range(2, 9) if packed and supports_tensor_parallel(model.config, size)]
    tensor = f"--ds_tensor_parallel_size {' or '.join(sizes)}" if sizes else "no --ds_tensor_parallel_size"
    ring = "--ring_attn_size" if packed and not verdict.not_shared else "no --ring_attn_size"
    return [*lines, f"over several processes: {tensor}, {ring}"]


def estimate_samples(report: DataReport, most: int, kept: int) -> tuple[int, bool]:
    """Estimated number of samples of the whole data, from the share of usable rows among those read so far.

    The second value tells whether the number is an estimate (True) or exact.
    """
    rows = min(report.in_files, most)
    if rows <= report.rows_read:
        return kept, False
    return round(rows * kept / report.rows_read), kept < report.rows_read


def memory_line(options: TrainedModelOptions, device: Device, work: Callable[[], Work]) -> str:
    """One line of `trimtab plan`: peak memory and, if the job does not fit, the flags that make it fit."""
    from trimtab.plan.planner import make_plan  # a second of imports

    processes = options.processes
    here, propose = shared(of_device(device), processes), processes == 1 and is_wanted(options, device, World())
    try:
        plan = make_plan(options, here, work(), processes, propose=propose)
        verdict = "it fits" if plan.fits else f"it does not fit: {plan.flags_that_fit()}"
    except UserError as error:
        return f"memory: not planned ({error})"
    each = "" if processes == 1 else f" in each of {processes} processes"
    return f"memory: about {plan.memory_gib:.2f} GiB at the peak{each}, of {here.memory / GIB:.1f} GiB here: {verdict}"


# ---- token budgets of micro-batches: planned from memory on an accelerator, a fixed number on a CPU


def with_planned_micro_batches(
    options: Job, device: Device, world: World, work: Callable[[], Work]
) -> tuple[Job, "Plan | None"]:
    """The options with the plan's token budget, and the plan; or the options unchanged and None. Micro-batches over
    several processes are not planned; only jobs that cannot fit at all are refused."""
    if isinstance(options, RLOptions) and options.ray:
        return options, None  # this process has none of the devices; `trimtab plan --nodes` plans them
    if isinstance(options, RLOptions) and world.size > 1:
        refuse_ungatherable(options, of_device(device), world.size)
    proposed = is_wanted(options, device, world)
    if not proposed and options.fit_memory:
        world.say("warning: --fit_memory has no effect over several processes: one device is planned for")
    if not proposed and not (options.plans_recomputation and world.size == 1 and options.trainer != "tail"):
        if options.plans_recomputation:
            world.say("all layers recompute: how many must is planned for one device alone")
        return options, None
    from trimtab.plan.planner import make_plan  # a second of imports

    try:
        plan = make_plan(options, of_device(device), work(), propose=proposed)
    except Exception as error:  # a failed plan must not stop a run that did not ask for one
        if options.fit_memory:
            raise
        world.say(f"memory is not planned ({first_line(error)}); passes of {options.micro_train_batch_size} samples")
        return options, None
    tokens, room = plan.memory.tokens, f"{plan.memory_gib:.1f} of {plan.hardware.memory / GIB:.1f} GiB"
    warning = "" if plan.fits else "warning: little memory is left, or none; trimtab plan says what it is for; "
    how = f" in which {recomputation}" if (recomputation := plan.recomputation()) else ""
    world.say(f"{warning}passes of up to {tokens:,} tokens{how}, by plan: {room} at the peak")
    changes = plan.changes() | ({"fit_memory": False} if proposed else {})
    return dataclasses.replace(options, **changes), plan


def is_wanted(options: TrainedModelOptions, device: Device, world: World) -> bool:
    """Whether the plan, and not the options, sets the micro-batch size."""
    if options.fit_memory is not None or world.size > 1 or options.trainer == "tail":
        return bool(options.fit_memory) and world.size == 1
    return device.is_accelerator and not options.given & PASS_SIZES


def refuse_ungatherable(options: RLOptions, hardware: Hardware, processes: int) -> None:
    """Refuse, before anything is loaded, a sharded RL job whose processes cannot hold the policy's gathered weights,
    which the built-in engine needs, in addition to their shards."""
    from trimtab.plan.planner import Planner, advice, fitting_changes, flag_changes

    machines = ClusterHardware(dataclasses.replace(hardware, program=0), 1, processes)
    planner = Planner(options, machines, supposed(options), propose=False)

    def needed(change: dict[str, Any]) -> tuple[int, int]:
        process = planner.changed(**change).bare_process()
        gathered = process.gathered_to_answer()[0].size
        return gathered, gathered + sum(part.size for part in process.state if "rollout" in part.phases)

    try:
        gathered, every = needed({})
    except UserError:  # a failed estimate must not stop a run: its own checks have better messages
        return
    if every <= hardware.memory:
        return
    ways = list(flag_changes(options, processes, accelerator=hardware.accelerator))
    found = fitting_changes(ways, lambda change: needed(change)[1], hardware.memory)
    tensor = options.ds_tensor_parallel_size
    share = "all" if tensor == 1 else f"1 / {tensor}"
    raise UserError(
        f"--pretrain {options.pretrain}: to answer, every process gathers {share} of the "
        f"policy's weights, {gathered / GIB:.1f} GiB, and holds {(every - gathered) / GIB:.1f} GiB besides, of "
        f"{hardware.memory / GIB:.1f} GiB ({hardware.name}); {advice(found)}"
    )


def uses_default_tokens(options: TrainedModelOptions, device: Device) -> bool:
    """Whether micro-batches have the default number of tokens: on a CPU, if no option sets their size."""
    if device.is_accelerator or options.fit_memory is not None or options.given & (PASS_SIZES | PER_DEVICE):
        return False
    if isinstance(options, RLOptions) and options.ray:  # the devices are on other machines
        return False
    return options.trainer == "rl" or not options.asks("packing_samples")  # which has no effect in RL


def with_default_tokens(options: Job, device: Device, saved: dict[str, int] | None = None) -> Job:
    """The options with the default token budget of micro-batches if it applies; at least one sample's tokens. `saved`:
    the micro-batch sizes of the run to resume, which are kept."""
    if not uses_default_tokens(options, device) or (saved is not None and "tokens" not in saved):
        return options
    longest = math.ceil(supposed(options).least / options.ring_attn_size)
    tokens = max(TOKENS_ON_CPU, longest) if saved is None else saved["tokens"]
    return dataclasses.replace(options, **budget_changes(options, tokens))


def without_tokens(options: Job) -> Job:
    """The options with micro-batches limited by samples: tokens do not bound the memory of padded rows."""
    return dataclasses.replace(options, **budget_changes(options, None))


def micro_batch_sizes(options: TrainedModelOptions, *, packed: bool) -> dict[str, int]:
    """The micro-batch size for the manifest. `packed`: whether the model takes packed rows."""
    by_tokens = packs_by_tokens(options) and (packed or isinstance(options, RLOptions))
    if by_tokens and options.train_max_tokens_per_gpu is not None:
        return {"tokens": options.train_max_tokens_per_gpu}
    return {"samples": options.micro_train_batch_size}


def default_line(options: TrainedModelOptions) -> str:
    """The log line about the default number of tokens."""
    return f"passes of up to {options.train_max_tokens_per_gpu:,} tokens; --micro_train_batch_size cuts by samples"


def work_of_prompts(options: RLOptions, stores: dict[str, PromptDataset]) -> Work:
    return rl_work(options, max(int(store.lengths.max()) for store in stores.values()))


def for_manifest(plan: "Plan | None") -> dict[str, Any]:
    if plan is None:
        return {}
    found = {"planned_memory_gib": plan.memory_gib}
    return found if plan.memory.recomputed is None else found | {"recomputing_layers": plan.memory.recomputed}
