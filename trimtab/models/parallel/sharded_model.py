"""Sharding of models as a job's options say: FSDP, tensor and context parallelism together."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import AutoConfig

from trimtab.config.jobs import LearnerOptions, SupervisedOptions
from trimtab.config.placement_options import ShardingOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.config.training_options import DropoutOptions, LoraOptions
from trimtab.distributed.device import Device
from trimtab.distributed.fsdp import GRADIENT_DTYPES, shard
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import World
from trimtab.errors import UserError
from trimtab.models.lora import refuse_adapted_experts
from trimtab.models.packed import PackedModel, scoring
from trimtab.models.parallel.context_parallel import ContextParallel
from trimtab.models.parallel.tensor_parallel import apply_tensor_parallel, check_tensor_parallel, key_value_heads_used
from trimtab.models.pretrained import from_pretrained
from trimtab.models.selfcheck import KEY_VALUE_HEADS

TrainedModelOptions = SupervisedOptions | RLOptions
HeldModelOptions = TrainedModelOptions | LearnerOptions
"""Options of everything that trains a model: a job, or Learner."""
Pass = TypeVar("Pass")


def mesh_of(options: ShardingOptions, world: World, ranks: Sequence[int] | None = None, *, learns: bool = True) -> Mesh:
    """The mesh of a job's models, over the whole world or these ranks; `learns`: one of the models is trained. All
    processes must call it."""
    return Mesh(world, ranks, **options.mesh_sizes(world.size if ranks is None else len(ranks), learns=learns))


def shard_trained(model: PackedModel, options: HeldModelOptions, mesh: Mesh) -> None:
    if mesh.size > 1 and options.lora_rank > 0:
        refuse_adapted_experts(model, "cannot be split over processes")
    if mesh.sizes["tensor"] > 1:
        apply_tensor_parallel(model, mesh.for_tensor_parallel())
    enable_context_parallel(model, options, mesh)
    shard(
        model,
        decoder_layers(model),
        mesh,
        zero_stage=options.zero_stage,
        dtype=torch.bfloat16 if options.bf16 else None,
        gradient_dtype=GRADIENT_DTYPES[options.grad_accum_dtype],
        offload=options.adam_offload,
        kept=mesh.for_neighbours(),
        prefetch=options.overlap_comm,
    )


def shard_frozen(model: PackedModel, mesh: Mesh, *, offload: bool) -> None:
    copies = mesh.sizes["shard"] > 1  # if the trained model is replicated, shard over all processes
    if mesh.sizes["tensor"] > 1:
        apply_tensor_parallel(model, mesh.for_tensor_parallel(copies=copies))
    shard(model, decoder_layers(model), mesh, zero_stage=3, offload=offload, copies=copies)


def is_frozen_sharded(options: ShardingOptions, mesh: Mesh, *, offload: bool) -> bool:
    return mesh.size > 1 and options.splits_frozen(offload=offload)


def enable_context_parallel(model: PackedModel, options: ShardingOptions, mesh: Mesh, flag: str = "--pretrain") -> None:
    """Enable context parallelism if the mesh has that dimension, also for an unsharded model. `flag`: the option that
    names the model."""
    if mesh.context.size == 1:
        return
    if model.path != "packed" or model.attention.not_shared:
        problem = model.not_packed or model.attention.not_shared
        raise UserError(
            f"--ring_attn_size {mesh.context.size} shares out packed rows, and {flag} has none to share "
            f"({type(model.inner).__name__}: {problem}); leave it out"
        )
    model.context = ContextParallel(mesh.context, options.ring_head_stride)


def decoder_layers(model: PackedModel) -> list[torch.nn.Module]:
    """The decoder layers, by Hugging Face's `_no_split_modules`."""
    names = set(model.inner._no_split_modules or ())
    return [module for module in model.inner.modules() if type(module).__name__ in names]


@dataclass(frozen=True)
class FrozenPlacement:
    """The placement of a frozen model's weights: on the device; in main memory between calls; or sharded over
    processes, which must then run the same number of passes, because each pass gathers weights from all."""

    device: Device
    mesh: Mesh | None = None  # the processes it is sharded over; None: not sharded
    offload: bool = False

    def settle(self, model: PackedModel) -> None:
        """Move the model to its place between calls."""
        if self._moves:
            model.to("cpu")

    @contextlib.contextmanager
    def at_work(self, model: PackedModel) -> Iterator[None]:
        """Move the model to the device for scoring inside the context."""
        if self._moves:
            model.to(self.device.torch)
        try:
            with scoring(model):
                yield
        finally:
            self.settle(model)

    def in_step(self, passes: Sequence[Pass], idle: Pass) -> Iterator[Pass]:
        """The passes of this process, then idle ones up to the largest number of any process."""
        most = len(passes) if self.mesh is None else self.mesh.all.maximum(len(passes))
        yield from passes
        for _ in range(most - len(passes)):
            yield idle

    @property
    def _moves(self) -> bool:
        """Whether the whole model is moved for each call; FSDP moves the shards of an offloaded model itself."""
        return self.offload and self.mesh is None and self.device.is_accelerator


def check_parallel_options(pretrain: str, options: ShardingOptions, flag: str) -> None:
    """Refuse a model that cannot be split as the options say, from its configuration alone, before it is loaded.
    `flag`: the option that names the model."""
    tensor, context = options.ds_tensor_parallel_size, options.ring_attn_size
    if tensor == context == 1:
        return
    config, model = from_pretrained(AutoConfig, pretrain, flag=flag), f"{flag} {pretrain}"
    if tensor > 1:
        asked = f"--ds_tensor_parallel_size {tensor}"
        check_tensor_parallel(config, tensor, f"{asked}: {model}")
        adapted = options.target_modules if isinstance(options, LoraOptions) and options.lora_rank > 0 else ()
        for name in ("embed_tokens", "lm_head"):
            if name in adapted:
                raise UserError(f"{asked}: --target_modules {name}: a layer cut by vocabulary takes no adapter")
    text = config.get_text_config()
    if context > 1:
        _check_stride(text, options, model)
    if flag not in ("--pretrain", "--critic_pretrain"):  # other models run without dropout
        return
    chosen = isinstance(options, DropoutOptions)  # jobs without --keep_dropout keep a model's dropout
    if isinstance(options, DropoutOptions) and not options.keep_dropout:
        return
    for name, value in vars(text).items():
        if "att" in name and "drop" in name and isinstance(value, float) and value > 0:
            flags, fix = ("--keep_dropout: ", "leave it out") if chosen else ("", f"set {name} to 0 in its config.json")
            raise UserError(
                f"{flags}{model} drops attention weights ({name} {value:g}), which processes that share rows or layers "
                f"cannot draw together; {fix}"
            )


def _check_stride(text: Any, options: ShardingOptions, model: str) -> None:
    """Refuse a --ring_head_stride that does not divide the key heads of each process."""
    stride, parts = options.ring_head_stride, options.ds_tensor_parallel_size
    heads = text.num_attention_heads
    keys = next((found for name in KEY_VALUE_HEADS if (found := getattr(text, name, None))), heads)
    counts = {keys // parts}
    if keys % parts:
        counts = {len(key_value_heads_used(heads, keys, parts, part)) for part in range(parts)}
    for count in counts:
        if count % stride:
            fits = max(size for size in range(1, stride) if count % size == 0)
            split = f" that a process has (--ds_tensor_parallel_size {parts})" if parts > 1 else ""
            raise UserError(
                f"--ring_head_stride {stride} does not divide the {count} heads of keys of {model}{split}: use {fits}"
            )
