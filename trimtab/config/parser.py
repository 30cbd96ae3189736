"""Command line, YAML file or values in Python to a job's options, and the text of `--help`.

Imports nothing heavy: an error must come before torch does.
"""

import argparse
import dataclasses
import difflib
import math
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trimtab.config.aliases import advice
from trimtab.config.objective_options import ESTIMATORS
from trimtab.config.option import Option, find, from_text, from_yaml, options_of, suggestion
from trimtab.config.paddlenlp_aliases import KEYS, Entry, in_our_words, is_paddle
from trimtab.config.resolved_config import MARK, settle
from trimtab.config.rl_jobs import RLOptions
from trimtab.config.training_options import PASS_SIZES, PER_DEVICE, CallOptions, checkpoints_in
from trimtab.errors import UserError

Job = TypeVar("Job", bound=CallOptions)


def parse(job_class: type[Job], argv: Sequence[str]) -> Job:
    """The options that `argv` (and the file its --config names) asks for; a mistake is a UserError of one line.

    `-h` and `--help` print the help (`--help all`: of every option) and leave through SystemExit(0).
    """
    if "-h" in argv or "--help" in argv:
        print(help_text(job_class, everything="all" in argv), end="")
        raise SystemExit(0)
    return _with_file(job_class, _from_command_line(job_class, argv), map(option_name, argv))


def parse_values(job_class: type[Job], values: Mapping[str, Any], arguments: Mapping[str, str] | None = None) -> Job:
    """The same from values by the options' names, as a caller in Python has them. `arguments`: the function's own
    arguments by the options that they stand for."""
    return _with_file(job_class, _from_values(job_class, values, arguments or {}), values)


def _with_file(job_class: type[Job], on_the_line: dict[str, Any], words: Iterable[str]) -> Job:
    """`words`: the names under which options were set."""
    path = on_the_line.get("config")
    text = _text(path) if path else ""  # once: it may be a pipe
    entries = _entries(path, text) if path else []
    if path and is_paddle(entries):
        return _of_paddle(job_class, path, entries, on_the_line)
    in_the_file = _from_file(job_class, path, entries) if path else {}
    chosen = {**in_the_file, **on_the_line}
    given = {*on_the_line, *in_the_file}
    if path:
        _check_verb(job_class, path, text, in_the_file, on_the_line)
    if text.startswith(MARK):
        # A resolved config names every option: those at their defaults are nobody's wish.
        given = {*on_the_line, *_wishes(job_class, in_the_file)}
        if re.fullmatch(rf"{job_class.verb}_\d{{8}}T\d{{6}}", str(in_the_file.get("wandb_run_name"))):
            given -= {"wandb_run_name"} - on_the_line.keys()  # made of the time, where nobody named the run
        if "save_path" in in_the_file and in_the_file.get("ckpt_path") == checkpoints_in(in_the_file["save_path"]):
            # Nobody's wish either: another --save_path has its own.
            given -= {"ckpt_path"} - on_the_line.keys()
            chosen["ckpt_path"] = on_the_line.get("ckpt_path")
    # Which word was used matters where two mean the same option but not the same step (see BatchOptions).
    given |= {name for name in words if name in PER_DEVICE}
    return job_class(**chosen, given=frozenset(given))


def _wishes(job_class: type[Job], resolved: Mapping[str, Any]) -> set[str]:
    """Options of a resolved config that are neither at their defaults nor what `settle` fills in without them."""
    defaults = options_of(job_class)
    wished = {name for name, value in resolved.items() if value != defaults[name].default}
    for name in sorted(wished):
        others = {other: value for other, value in resolved.items() if other != name}
        with suppress(UserError):  # the others cannot do without it
            settled, _ = settle(job_class(**others, given=frozenset(wished - {name})))
            if getattr(settled, name) == resolved[name]:
                wished.remove(name)
    return wished


def _of_paddle(job_class: type[Job], path: str, entries: Sequence[Entry], on_the_line: dict[str, Any]) -> Job:
    """The options of a file of PaddleNLP: it has a value for everything, and only some are somebody's wish."""
    if job_class.verb != "rl":
        raise UserError(f"--config {path} is PaddleNLP's: use trimtab rl, which does what a file says")
    in_the_file, notes, origins = in_our_words(job_class, path, entries, on_the_line)
    defaults = options_of(job_class)
    wished = {name for name, value in in_the_file.items() if value != defaults[name].default}
    given = {*on_the_line, *wished, *(PASS_SIZES & in_the_file.keys())}
    options = job_class(**{**in_the_file, **on_the_line}, given=frozenset(given))
    assert isinstance(options, RLOptions)
    return dataclasses.replace(options, notes=(*notes, *_accumulation(options)), origins=origins)


def _accumulation(options: RLOptions) -> Iterator[str]:
    """How many passes a process makes for an optimiser step: PaddleNLP derives that, and so do we."""
    group, micro = options.n_samples_per_prompt, options.micro_train_batch_size
    if min(group, micro, options.ring_attn_size, options.ds_tensor_parallel_size) < 1:
        return  # of the command line, which is checked after this
    answers = min(options.train_batch_size, options.rollout_batch_size * group)
    processes = options.data_parts(int(os.environ.get("WORLD_SIZE", options.processes)))
    passes = math.ceil(answers / (micro * processes))
    shared = "1 data-parallel process" if processes == 1 else f"{processes} data-parallel processes"
    yield (
        f"gradient accumulation {passes}: {answers // group} prompts x {group} answers / {micro} in a pass / {shared}"
    )


def _check_verb(
    job_class: type[Job], path: str, text: str, in_the_file: dict[str, Any], on_the_line: dict[str, Any]
) -> None:
    """A config of another method would silently make another method of this verb; `trimtab rl` takes any."""
    first = text.partition("\n")[0]
    written_by = first.removeprefix(MARK) if first.startswith(MARK) else job_class.verb
    if job_class.verb == "rl" or "advantage_estimator" in on_the_line:
        return
    if written_by not in (job_class.verb, "rl"):
        raise UserError(
            f"--config {path} is of trimtab {written_by}, not of trimtab {job_class.verb}: use that verb"
            + (", or trimtab rl, which does what a file says" if "advantage_estimator" in in_the_file else "")
        )
    name = "advantage_estimator"
    if name in in_the_file and job_class.verb != "tail":
        own, found = options_of(job_class)[name].default, in_the_file[name]
        known = ESTIMATORS.get(found)
        if own not in (found, known.variant_of if known else None):
            raise UserError(
                f"--config {path} says {name}: {found}, and trimtab {job_class.verb} is {own}: use trimtab rl, which "
                f"does what a file says, or put --{name} {found} on the command line"
            )


def take_negative_numbers(parser: argparse.ArgumentParser) -> None:
    """argparse knows -10 and -1.5, but takes -1e1 for an option."""
    parser._negative_number_matcher = re.compile(r"-\.?\d")


def _from_command_line(job_class: type[CallOptions], argv: Sequence[str]) -> dict[str, Any]:
    """Only the options that were given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    take_negative_numbers(parser)
    for option in options_of(job_class).values():
        parser.add_argument(
            option.flag, *(f"--{alias}" for alias in option.aliases), dest=option.name, **_arity(option)
        )
    try:
        namespace, rest = parser.parse_known_args([_underscored(word) for word in argv])
    except argparse.ArgumentError as error:
        raise UserError(f"{(error.argument_name or '').split('/')[0]}: {error.message}") from None
    if rest:
        raise UserError(_not_understood(job_class, rest))
    known = options_of(job_class)
    return {name: _whole(known[name], value) for name, value in vars(namespace).items()}


def _whole(option: Option, value: Any) -> Any:
    if option.count is None:
        return value
    return None if option.optional and value == ["None"] else tuple(value)


def _arity(option: Option) -> dict[str, Any]:
    def convert(text: str) -> Any:
        try:
            return from_text(option, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    arguments: dict[str, Any] = {"type": convert, "default": argparse.SUPPRESS}
    if option.kind is bool or option.bare:
        arguments |= {"nargs": "?", "const": option.bare or True}
    elif option.count is not None:
        arguments |= {"nargs": option.count or "+"}
    return arguments


def _underscored(word: str) -> str:
    """--max-len is --max_len; values stay as they are."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def option_name(word: str) -> str:
    return _underscored(word).removeprefix("--").partition("=")[0]


def _not_understood(job_class: type[CallOptions], words: Sequence[str]) -> str:
    word = words[0]
    if "=" in word and (told := advice(word.partition("=")[0].lstrip("+"), options_of(job_class))):
        return f"{word.partition('=')[0]} is not understood; {told}"
    if word.startswith("-") and word.strip("-"):
        # A value after = may be a key, so only the name is repeated.
        return unknown(job_class, [word.split("=")[0] for word in words if re.match("--?[A-Za-z]", word)])
    return f"unexpected {word!r}: every value follows its option, and one with spaces needs quotes"


def unknown(job_class: type[CallOptions], words: Sequence[str], arguments: Mapping[str, str] | None = None) -> str:
    """What to say of words that are no options, each with what is meant by it. `arguments`: of the function that they
    were given to, by the options that these stand for; None: they are on a command line or in a file."""
    what = "option" if arguments is None else "argument"
    told = f"unknown {what}{'s' * (len(words) > 1)} {', '.join(words)}"
    for word in dict.fromkeys(words):
        name, prefix = word.lstrip("-"), "--" if arguments is not None else word[: len(word) - len(word.lstrip("-"))]
        options = options_of(job_class)
        if hint := advice(name, options, in_python=arguments is not None) or _told_of_key(name, options):
            told += f"; {hint}"
        else:
            named = f"{word}: " if len(words) > 1 else ""
            told += f"; {named}{_meant(job_class, name, prefix and '--', arguments)}"
    return told


def _told_of_key(name: str, known: Container[str]) -> str | None:
    """What a key is here, for who puts it on the command line of a job that has the options `known`."""
    key = KEYS.get(name)
    if key is None or "rollout_batch_size" not in known:
        return None
    here = key.here.replace("`", "")
    return f"PaddleNLP's {name} is {here}" if "--" in here else f"{name} is a key of PaddleNLP's file ({here})"


def _meant(job_class: type[CallOptions], name: str, prefix: str, arguments: Mapping[str, str] | None) -> str:
    by_argument = {argument: option for option, argument in (arguments or {}).items()}
    if close := difflib.get_close_matches(name, by_argument, n=1, cutoff=0.7):
        return f"did you mean {prefix}{by_argument[close[0]]}?"
    if nearest := suggestion(job_class, name):
        return f"did you mean {prefix}{nearest}?"
    listing = f"trimtab {job_class.verb} --help all" if arguments is None else f"trimtab.options({job_class.verb!r})"
    return f"{listing} lists them"


def _from_file(job_class: type[CallOptions], path: str, entries: Sequence[Entry]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for line, key, value in entries:
        where = f"{path} line {line}"
        option = find(job_class, key)
        if option is None:
            hint = " (options are not nested)" if isinstance(value, dict) else ""
            raise UserError(f"{where}: {unknown(job_class, [key])}{hint}")
        if option.of_this_call:
            raise UserError(f"{where}: {key} belongs on the command line, not in a config file")
        if option.name in chosen:
            raise UserError(f"{where}: {option.name} is set twice in this file")
        try:
            chosen[option.name] = from_yaml(option, value)
        except ValueError as error:
            raise UserError(f"{where}: {key} {error}") from None
    return chosen


def _from_values(
    job_class: type[CallOptions], values: Mapping[str, Any], arguments: Mapping[str, str]
) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    if strange := [name for name in values if find(job_class, name) is None]:
        raise UserError(unknown(job_class, strange, arguments))
    for name, value in values.items():
        option = find(job_class, name)
        assert option is not None
        if option.name in chosen:
            raise UserError(f"--{option.name} is set twice, once as {name}")
        chosen[option.name] = value_of(option, value, f"--{name}")
    return chosen


def value_of(option: Option, value: Any, name: str) -> Any:
    """The option's value from a caller's in Python. `name`: what an error calls it."""
    try:
        return from_yaml(option, as_in_yaml(value))
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def as_in_yaml(value: Any) -> Any:
    """Paths are text, all sequences are lists, and a library's numbers are Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple | range | set | frozenset):
        return [*map(as_in_yaml, value)]
    return value.tolist() if hasattr(value, "tolist") else value


def _text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a UTF-8 text file"
        raise UserError(f"--config {path}: {reason}") from None


def _entries(path: str, text: str) -> list[Entry]:
    """The file's (line, key, value) triples, repeated keys included."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path} line {root.start_mark.line + 1}: a config holds lines of the form `name: value`")
        return [
            (
                key.start_mark.line + 1,
                str(loader.construct_object(key, deep=True)),
                loader.construct_object(value, deep=True),
            )
            for key, value in root.value
        ]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{where}: not valid YAML: {error.problem}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply; a config holds lines of the form `name: value`") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


# ---- help


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
