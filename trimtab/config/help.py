"""The text of `--help`."""

import shutil
import textwrap
from collections.abc import Callable
from itertools import groupby

from trimtab.config.catalogue import Option, options_of
from trimtab.config.estimators import ESTIMATORS
from trimtab.config.groups import CallOptions

_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}
_COLUMN = 34


COMMON = {
    *("config", "dry_run", "nproc", "pretrain", "bf16", "lora_rank", "max_len", "generate_max_len", "max_samples"),
    *("dataset", "prompt_data", "eval_dataset", "apply_chat_template", "input_key", "output_key", "label_key"),
    *("prompt_key", "chosen_key", "rejected_key", "train_batch_size", "max_epochs", "max_steps", "learning_rate"),
    *("actor_learning_rate", "critic_learning_rate", "save_path", "save_steps", "load_checkpoint", "init_kl_coef"),
    *("n_samples_per_prompt", "rollout_batch_size", "reward_verifier", "reward_pretrain", "reward_func", "beta"),
    *("preference_loss", "teacher_model", "kd_coef", "placeholder_token", "reward_tokens"),
    *("environment", "best_of_n", "temperature"),
}
"""The options that people use, of all jobs."""
RARE_IN_RL = {
    *("max_epochs", "max_steps", "max_len", "max_samples", "nproc", "placeholder_token", "reward_tokens"),
    *("teacher_model", "save_steps", "load_checkpoint"),
}
FEW = 60
"""A job with no more options than this shows them all."""


def common_options(job_class: type[CallOptions]) -> dict[str, Option]:
    """The options that people use, in the order of all."""
    options = options_of(job_class)
    if len(options) <= FEW:
        return options
    names = COMMON - RARE_IN_RL if "rollout_batch_size" in options and "prompt_data" in options else COMMON
    if "advantage_estimator" in options and not ESTIMATORS[options["advantage_estimator"].default].critic:
        names = names - {"critic_learning_rate"}
    return {name: option for name, option in options.items() if name in names or option.required}


def help_text(job_class: type[CallOptions], width: int | None = None, *, everything: bool = False) -> str:
    """The options that people use, or every option, each under its heading, wrapped to the terminal."""
    width = width or max(70, min(shutil.get_terminal_size().columns, 120))
    verb = job_class.verb
    needed = [f"{option.flag} {option.required[0]}" for option in options_of(job_class).values() if option.required]
    lines = [
        f"usage: trimtab {' '.join([verb, *needed])} [option ...]",
        f"       trimtab {verb} --config FILE.yaml [option ...]",
        "",
        *textwrap.wrap(
            "A switch stands alone or is followed by True or False. Where no default is shown, a switch is off and any "
            "other option unset; None unsets one that can be unset.",
            width,
        ),
    ]
    chosen = options_of(job_class) if everything else common_options(job_class)
    by_section = sorted(chosen.values(), key=_section_order(job_class))
    for section, members in groupby(by_section, key=lambda option: option.section):
        lines += ["", f"{section}:"]
        for option in members:
            lines += _entry(option, width)
    lines += ["", "  -h, --help".ljust(_COLUMN) + "Show this and stop."]
    if len(chosen) < (total := len(options_of(job_class))):
        lines += ["  --help all".ljust(_COLUMN) + f"Show all {total} options; these are the {len(chosen)} most used."]
    return "\n".join(lines) + "\n"


def _section_order(job_class: type) -> Callable[[Option], int]:
    order = list(dict.fromkeys(option.section for option in options_of(job_class).values()))
    return lambda option: order.index(option.section)


def _entry(option: Option, width: int) -> list[str]:
    notes = [f"default: {shown_default(option)}"] if not (option.default is None or option.default is False) else []
    notes += [f"also --{alias}" for alias in option.aliases if "." not in alias]  # those are in docs/from_openrlhf.md
    if not all(str(choice) in option.help for choice in option.limits.choices):
        notes.insert(0, f"{option.limits}")
    text = option.help + (f" ({'; '.join(notes)})" if notes else "")
    left = f"  {option.flag} {metavar(option)}".rstrip()
    body = textwrap.wrap(text, width - _COLUMN, break_long_words=False, break_on_hyphens=False)
    if len(left) > _COLUMN - 2:
        return [left, *(" " * _COLUMN + line for line in body)]
    return [left.ljust(_COLUMN) + body[0], *(" " * _COLUMN + line for line in body[1:])]


def metavar(option: Option) -> str:
    if option.kind is bool:
        return ""
    one = _METAVARS[option.kind]
    if option.bare:
        return f"[{one}]"
    if option.count is None:
        return "|".join([one, *option.words])
    return f"{one} ..." if option.count == 0 else " ".join([one] * option.count)


def shown_default(option: Option) -> str:
    if option.kind is bool:
        return "on"
    values = option.default if option.count is not None else (option.default,)
    return " ".join(_shown_value(value) for value in values)


def _shown_value(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    return repr(text) if text != "".join(text.split()) else text
