"""What every process of a split RL job has on its device while the built-in engine answers: all weights of the policy
that a tensor group does not cut among itself.

The engine reads a split policy gathered: layer by layer would be a gathering a token. So the policy's working weights
must fit beside what a process holds anyway: its share of masters, Adam's moments and frozen models. This is a lower
bound, of which keys and values are no part; where even it does not fit, nothing else needs to be tried.
"""

from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.device import Device
from trimtab.errors import UserError
from trimtab.models.load import TrainedModelOptions
from trimtab.models.packed import PackedModel
from trimtab.plan import advice
from trimtab.plan.hardware import GIB, Hardware, of_device
from trimtab.plan.memory import Part
from trimtab.plan.workload import frozen_models, trained_models

PHASES = ("rollout",)


def refuse_ungatherable(options: RLOptions, device: Device, processes: int) -> None:
    """In one line, before anything is loaded."""
    hardware = of_device(device)  # of main memory, the share of one process
    try:
        needed, told = in_words(options, processes, hardware)
    except UserError:  # no fault of the counting may keep a run from starting: its own checks have better words
        return
    if needed > hardware.memory:
        ways = list(advice.changes(options, processes, accelerator=hardware.accelerator))
        found = advice.that_fit(options, ways, lambda tried: _needed(tried, processes, hardware), hardware.memory)
        raise UserError(f"--pretrain {options.pretrain}: {told}; {advice.in_words(found)}")


def _needed(options: TrainedModelOptions, processes: int, hardware: Hardware) -> int:
    assert isinstance(options, RLOptions)
    parts = gathered_parts(options, processes, accelerator=hardware.accelerator)
    return sum(part.size for part in parts)


def in_words(options: RLOptions, processes: int, hardware: Hardware, sharers: int = 1) -> tuple[int, str]:
    """Bytes that a process needs to answer, and that beside what it has. `sharers`: processes that share a memory."""
    parts = gathered_parts(options, processes, accelerator=hardware.accelerator)
    needed, gathered = sum(part.size for part in parts), parts[0].size
    return needed, (
        f"to answer, every process gathers {_share_of_weights(options)} weights, {gathered / GIB:.1f} GiB, and holds "
        f"{(needed - gathered) / GIB:.1f} GiB besides, of {hardware.memory // sharers / GIB:.1f} GiB ({hardware.name})"
    )


def gathered_parts(options: RLOptions, processes: int, *, accelerator: bool) -> list[Part]:
    """The policy's gathered weights, and what a process holds besides."""
    trained = trained_models(options)
    sizes, tensor = options.group_sizes(processes), options.ds_tensor_parallel_size
    parts = [Part("actor: weights, gathered", _working(options, trained["actor"]) // tensor, PHASES)]
    for name, model in trained.items():
        share = sizes[name] // options.mesh_sizes(sizes[name])["replicate"]
        learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in model.parameters()) - learnt
        if not (options.adam_offload and accelerator):
            averaged = 4 * learnt if options.enable_ema and name == "actor" else 0
            parts.append(Part(f"{name}: masters and moments, its share", (12 * learnt + averaged) // share, PHASES))
        parts.append(Part(f"{name}: frozen weights, its share", frozen * _bytes(options) // share, PHASES))
    for found in frozen_models(options):
        split = sizes[found.name.split()[0]] if options.splits_frozen(offload=found.offload) else 1
        split //= options.mesh_sizes(split, learns=False)["replicate"] if split > 1 and options.shard_size else 1
        if not (found.offload and accelerator):
            parts.append(Part(f"{found.name}: weights", _working(options, found.model) // split, PHASES))
    return parts


def _working(options: RLOptions, model: PackedModel) -> int:
    return _bytes(options) * sum(p.numel() for p in model.parameters())


def _bytes(options: RLOptions) -> int:
    return 2 if options.bf16 else 4


def _share_of_weights(options: RLOptions) -> str:
    cut = options.ds_tensor_parallel_size
    return "all of the policy's" if cut == 1 else f"1 / {cut} of the policy's"
