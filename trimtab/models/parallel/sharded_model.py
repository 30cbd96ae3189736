"""Which parts of a model each process holds, from a job's options: FSDP, tensor and context parallelism together."""

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
"""Of what trains a model: a job, or a caller of Learner."""
Pass = TypeVar("Pass")


def mesh_of(options: ShardingOptions, world: World, ranks: Sequence[int] | None = None, *, learns: bool = True) -> Mesh:
    """The processes that hold a job's models, all of the world or those of these ranks; `learns`: one of them is
    trained. Every process must ask."""
    return Mesh(world, ranks, **options.mesh_sizes(world.size if ranks is None else len(ranks), learns=learns))


def shard_trained(model: PackedModel, options: HeldModelOptions, mesh: Mesh) -> None:
    if mesh.size > 1 and options.lora_rank > 0:
        refuse_adapted_experts(model)
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
    copies = mesh.sizes["shard"] > 1  # where the trained one is not sharded this one is worth sharding over all
    if mesh.sizes["tensor"] > 1:
        apply_tensor_parallel(model, mesh.for_tensor_parallel(copies=copies))
    shard(model, decoder_layers(model), mesh, zero_stage=3, offload=offload, copies=copies)


def is_frozen_sharded(options: ShardingOptions, mesh: Mesh, *, offload: bool) -> bool:
    return mesh.size > 1 and options.splits_frozen(offload=offload)


def enable_context_parallel(model: PackedModel, options: ShardingOptions, mesh: Mesh, flag: str = "--pretrain") -> None:
    """Share the tokens of a row out where the mesh says so, also of a model that every process holds whole. `flag`:
    what the user calls it."""
    if mesh.context.size == 1:
        return
    if model.path != "packed":
        raise UserError(
            f"--ring_attn_size {mesh.context.size} shares out packed rows, and {flag} cannot take any "
            f"({type(model.inner).__name__}); leave it out"
        )
    model.context = ContextParallel(mesh.context, options.ring_head_stride)


def decoder_layers(model: PackedModel) -> list[torch.nn.Module]:
    """The repeated layers, by the class names that Hugging Face says must not be split."""
    names = set(model.inner._no_split_modules or ())
    return [module for module in model.inner.modules() if type(module).__name__ in names]


@dataclass(frozen=True)
class FrozenPlacement:
    """Where the weights of a model that only scores are: on the device; in main memory between calls; or sharded over
    processes, which then make equally many passes, because each of them gathers the weights from all."""

    device: Device
    mesh: Mesh | None = None  # whose processes it is sharded over; None: it is not
    offload: bool = False

    def settle(self, model: PackedModel) -> None:
        """After loading."""
        if self._moves:
            model.to("cpu")

    @contextlib.contextmanager
    def at_work(self, model: PackedModel) -> Iterator[None]:
        """The model on the device, ready to score."""
        if self._moves:
            model.to(self.device.torch)
        try:
            with scoring(model):
                yield
        finally:
            self.settle(model)

    def in_step(self, passes: Sequence[Pass], idle: Pass) -> Iterator[Pass]:
        """The passes of this process, and as many idle ones as another one has more."""
        most = len(passes) if self.mesh is None else self.mesh.all.maximum(len(passes))
        yield from passes
        for _ in range(most - len(passes)):
            yield idle

    @property
    def _moves(self) -> bool:
        """A sharded model that is offloaded moves by itself."""
        return self.offload and self.mesh is None and self.device.is_accelerator


def check_parallel_options(pretrain: str, options: ShardingOptions, flag: str) -> None:
    """Refuse a model that cannot be split as the options say, from its configuration alone: before anything is loaded.
    `flag`: what the user calls the model."""
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
    if flag not in ("--pretrain", "--critic_pretrain"):  # others drop nothing
        return
    chosen = isinstance(options, DropoutOptions)  # jobs without the option keep a model's dropout
    if isinstance(options, DropoutOptions) and not options.keep_dropout:
        return
    for name, value in vars(text).items():
        if "att" in name and "drop" in name and isinstance(value, float) and value > 0:
            said, mend = ("--keep_dropout: ", "leave it out") if chosen else ("", f"set {name} to 0 in its config.json")
            raise UserError(
                f"{said}{model} drops attention weights ({name} {value:g}), which processes that share rows or layers "
                f"cannot draw together; {mend}"
            )


def _check_stride(text: Any, options: ShardingOptions, model: str) -> None:
    """The key heads that are gathered together must divide the key heads of each process."""
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
