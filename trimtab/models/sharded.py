"""Over which processes a model is split, and which parts of it, from the options of a job."""

from collections.abc import Sequence

import torch

from trimtab.config.jobs import SupervisedOptions
from trimtab.config.learner import LearnerOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.config.sharding import ShardingOptions
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.sharding import GRADIENT_DTYPES, shard
from trimtab.distributed.world import World
from trimtab.errors import UserError
from trimtab.models.context_attention import Context
from trimtab.models.lora import refuse_adapted_experts
from trimtab.models.packed import PackedModel
from trimtab.models.tensor_parallel import cut

TrainedModelOptions = SupervisedOptions | RLOptions
HeldModelOptions = TrainedModelOptions | LearnerOptions
"""Of what trains a model: a job, or whoever calls a Learner."""


def mesh_of(options: ShardingOptions, world: World, ranks: Sequence[int] | None = None, *, learns: bool = True) -> Mesh:
    """The processes that hold a job's models, all of the world or those of these ranks; `learns`: one of them is
    trained. Every process must ask."""
    return Mesh(world, ranks, **options.mesh_sizes(world.size if ranks is None else len(ranks), learns=learns))


def shard_trained(model: PackedModel, options: HeldModelOptions, mesh: Mesh) -> None:
    if mesh.size > 1 and options.lora_rank > 0:
        refuse_adapted_experts(model)
    if mesh.sizes["tensor"] > 1:
        cut(model, mesh.for_cutting())
    share_rows(model, options, mesh)
    shard(
        model,
        decoder_layers(model),
        mesh,
        zero_stage=options.zero_stage,
        dtype=torch.bfloat16 if options.bf16 else None,
        gradient_dtype=GRADIENT_DTYPES[options.grad_accum_dtype],
        offload=options.adam_offload,
        kept=mesh.for_keeping(),
        prefetch=options.overlap_comm,
    )


def frozen_is_split(options: ShardingOptions, mesh: Mesh, *, offload: bool) -> bool:
    return mesh.size > 1 and options.splits_frozen(offload=offload)


def shard_frozen(model: PackedModel, mesh: Mesh, *, offload: bool) -> None:
    copies = mesh.sizes["shard"] > 1  # where the trained one is not split this one is worth splitting over all
    if mesh.sizes["tensor"] > 1:
        cut(model, mesh.for_cutting(copies=copies))
    shard(model, decoder_layers(model), mesh, zero_stage=3, offload=offload, copies=copies)


def share_rows(model: PackedModel, options: ShardingOptions, mesh: Mesh, flag: str = "--pretrain") -> None:
    """The tokens of a row are split where the mesh says so, also of a model that every process holds whole. `flag`:
    what the user calls it."""
    if mesh.context.size == 1:
        return
    if model.path != "packed":
        raise UserError(
            f"--ring_attn_size {mesh.context.size} shares out packed rows, and {flag} cannot take any "
            f"({type(model.inner).__name__}); leave it out"
        )
    model.context = Context(mesh.context, options.ring_head_stride)


def decoder_layers(model: PackedModel) -> list[torch.nn.Module]:
    """The repeated layers, by the class name that Hugging Face says must not be cut."""
    names = set(model.inner._no_split_modules or ())
    return [module for module in model.inner.modules() if type(module).__name__ in names]
