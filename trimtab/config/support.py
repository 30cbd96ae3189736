"""What this version, or this machine, cannot do. Nothing here imports the packages it looks for."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from trimtab.config.bounds import changed
from trimtab.config.placement import placement_problems
from trimtab.config.rl import PlacementOptions
from trimtab.errors import UserError

_NOT_IMPLEMENTED = {
    "deepcompile": "is DeepSpeed's compiler and not implemented; leave it out",
    "zpg": "(ZeRO++ hierarchical partitions) is not implemented yet; leave it at 1",
    "ds_tensor_parallel_size": "(tensor parallel training) is not implemented yet; leave it at 1",
    "ring_attn_size": "(ring attention) is not implemented yet; leave it at 1, and lower --max_len if memory is short",
    "ring_head_stride": "belongs to ring attention, which is not implemented yet; leave it at 1",
    "use_ms": "(ModelScope) is not implemented; fetch model and data with modelscope and give their folders",
    "use_ds_universal_ckpt": "is not needed: a checkpoint made here loads on any number of processes; leave it out",
    "async_train": "(answers written while learning) is not implemented yet; leave it out",
    "agent_func_path": "(rollouts of several turns) is not implemented yet; leave it out",
}


def refuse_unimplemented(options: Any) -> None:
    """A UserError for the first option that is set and that this version does not do."""
    for name, reason in _NOT_IMPLEMENTED.items():
        if changed(options, name):
            raise UserError(f"--{name} {reason}")


def hardware_problems(options: Any, accelerators: Callable[[], int]) -> list[str]:
    """What this machine lacks for these options: errors at the start of a run, warnings in a dry run.

    `accelerators` counts what is here, and is asked only where the answer matters.
    """
    problems = placement_problems(options, accelerators) if isinstance(options, PlacementOptions) else []
    asked = getattr(options, "tp_size", None) or 1
    if asked > 1 and asked > (found := accelerators()):
        problems.append(f"--tp_size {asked} asks for more GPUs than the {found} of this machine: leave it out")
    flash_attention = getattr(options, "attn_implementation", None) == "flash_attention_2"
    for wanted, flag, module, package in (
        (getattr(options, "use_wandb", None), "--use_wandb", "wandb", "'trimtab[wandb]'"),
        (getattr(options, "use_visualdl", None), "--use_visualdl", "visualdl", "'trimtab[visualdl]'"),
        (getattr(options, "load_in_4bit", False), "--load_in_4bit", "bitsandbytes", "'trimtab[qlora]'"),
        (getattr(options, "use_liger_kernel", False), "--use_liger_kernel", "liger_kernel", "'trimtab[liger]'"),
        (flash_attention, "--attn_implementation flash_attention_2", "flash_attn", "flash-attn"),
    ):
        if wanted and not _installed(module):
            problems.append(f"{flag} needs the package {module}: pip install {package}, or leave the option out")
    return problems


def _installed(module: str) -> bool:
    return find_spec(module) is not None
