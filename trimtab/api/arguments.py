"""The arguments of a call from Python as options of a job.

Objects become files of the run, `SAVE_PATH/given/`, and rewards become the options that name them. So the manifest,
exact resume, reports and several processes work as with a command, and a command with these files is the same run. The
files are first written to a temporary folder and move to the run's folder once its options are found good: a refused
call leaves nothing behind, and sets no earlier run aside. Models, which are large, are written there directly.

Errors that name options are translated back: a caller in Python reads the names of arguments.
"""

import difflib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trimtab.api.environments import with_tools
from trimtab.config.objective_options import GIVEN
from trimtab.config.option import Option, find, options_of
from trimtab.config.parser import parse_values
from trimtab.config.training_options import PER_DEVICE, CallOptions
from trimtab.errors import UserError
from trimtab.files import remove, write_bytes, write_text, writing


def suggested(word: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the closest known one, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"


# ---- objects as files

FOLDER = "given"

_STUB = '''"""Written by Trimtab: the environment that was given in Python, in environment.pkl beside this file."""

import sys
from pathlib import Path

import dill

sys.path.extend({paths!r})
Given = dill.loads(Path(__file__).with_name("environment.pkl").read_bytes())
'''


class GivenFiles:
    """The objects of one call as files, in a temporary folder until `move_to`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[str, tuple[Any, Any]] = {}

    def __bool__(self) -> bool:
        return any(self.folder.iterdir())

    def model(self, name: str, model: Any, tokenizer: Any) -> str:
        """A loaded model; `name`: the option that it stands for. A text is a place already."""
        if isinstance(model, str | os.PathLike):
            if tokenizer is not None:
                raise UserError("tokenizer: it comes with a loaded model; a folder or a name brings its own")
            return os.fspath(model)
        if not is_model(model):
            raise UserError(f"--{name} takes a folder, a name or a loaded PreTrainedModel, not {_kind(model)}")
        self._models[name] = model, tokenizer if tokenizer is not None else _tokenizer_of(model, name)
        (self.folder / name).mkdir()
        return str(self.folder / name)

    def rows(self, name: str, rows: Any, column: str, most: int | None = None) -> str:
        """Rows: texts, lists of messages (both become `column`) or dicts. A text is a place already. `most`: how many
        are taken of what has no length."""
        if isinstance(rows, str | os.PathLike):
            return os.fspath(rows)
        if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
            raise UserError(
                f"--{name} takes a path, a hub name, or rows (texts, messages, dicts or a datasets.Dataset), not "
                f"{_kind(rows)}" + ("; give one of its splits" if isinstance(rows, Mapping) else "")
            )
        if not isinstance(rows, Sized):
            rows = islice(rows, most)
        lines = (json.dumps(row, ensure_ascii=False) for row in _plain_rows(rows, name, column))
        first = next(lines, None)
        if first is None:
            raise UserError(f"--{name}: there are no rows in what was given")
        place = self.folder / f"{name}.jsonl"
        with writing("what was given in Python: cannot write it"), place.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in chain([first], lines))
        return str(place)

    def environment(self, environment: Any, tools: Sequence[Callable[..., Any]]) -> dict[str, str]:
        """The option that says which environment is played."""
        if isinstance(environment, str | os.PathLike) and not tools:
            text = os.fspath(environment)
            is_file = text.partition(":")[0].endswith(".py") or text.endswith(".py")
            return {"agent_func_path" if is_file else "environment": text}
        if isinstance(environment, str | os.PathLike):
            raise UserError("tools: an environment that is named has its own; give tools, or a class with them")
        made = with_tools(environment, tools)
        import dill

        try:
            content = dill.dumps(made, recurse=True)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"environment: {getattr(made, '__name__', made)} cannot be sent to a process of its own ({reason}): "
                "write it to a file and give FILE.py:NAME"
            ) from error
        write_bytes(self.folder / "environment.pkl", content)
        stub = self.folder / "environment.py"
        write_text(stub, _STUB.format(paths=[path or os.getcwd() for path in sys.path]))
        return {"agent_func_path": f"{stub}:Given"}

    def move_to(self, save_path: str) -> Callable[[Any], Any]:
        """Move the files to the run's folder, and return a function that turns their old paths into the new ones."""
        home = Path(save_path).expanduser().resolve() / FOLDER
        if self:
            with writing(f"--save_path {save_path}: cannot write there"):
                home.mkdir(parents=True, exist_ok=True)
                for place in self.folder.iterdir():
                    remove(home / place.name)
                    if place.name in self._models:
                        _save(*self._models[place.name], home / place.name)
                    else:
                        shutil.move(place, home / place.name)

        def moved(value: Any) -> Any:
            return value.replace(str(self.folder), str(home)) if isinstance(value, str) else value

        return moved


def is_model(value: Any) -> bool:
    """Whether it is a loaded model of transformers, which need not be imported to say so."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(value).__mro__)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    from trimtab.models.pretrained import quiet_transformers

    quiet_transformers()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer_of(model: Any, name: str) -> Any:
    place = getattr(model, "name_or_path", "")
    if not place:
        raise UserError(f"--{name}: a loaded model needs its tokenizer: give tokenizer=")
    from transformers import AutoTokenizer

    from trimtab.models.pretrained import from_pretrained

    return from_pretrained(AutoTokenizer, place, flag=f"--{name}")


def _plain_rows(rows: Iterable[Any], name: str, column: str) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows):
        where = f"--{name}: row {number}"
        if isinstance(row, str) or (isinstance(row, list | tuple) and row and isinstance(row[0], Mapping)):
            row = {column: row}
        if not isinstance(row, Mapping):
            raise UserError(f"{where} is {_kind(row)}: a row is a text, a list of messages or a dict of columns")
        yield {str(key): _plain(value, f"{where}, column {key}") for key, value in row.items()}


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one, where) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, where) for one in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), where)
    raise UserError(f"{where}: {_kind(value)} has no form in JSON; make a text or a number of it")


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


# ---- rewards as options

# In the order in which --reward_weights counts them; a verifier's weight stands in its name.
OPTIONS = ("reward_pretrain", "reward_func", "remote_rm_url", "reward_verifier")


def reward_options(
    reward: Any, options: Mapping[str, Any], given: GivenFiles
) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """The options for a reward or a list of them, and the functions that they name. Weights among the options are in
    the order of the list."""
    if reward is None:
        return {}, {}
    if both := [name for name in OPTIONS if options.get(name) is not None]:
        raise UserError(f"rewards are given twice, as reward and as {', '.join(both)}: give one of them")
    rewards = list(reward) if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]
    if not rewards:
        raise UserError("reward: the list is empty")
    judged = int(bool(options.get("judge")))  # the judge is an option, whose weight is the last
    weights = _weights(options.get("reward_weights"), len(rewards) + judged)
    functions: dict[str, Callable[..., Any]] = {}
    places: dict[str, list[tuple[str, float | None]]] = {name: [] for name in OPTIONS}
    for one, weight in zip(rewards, weights):
        option, text = _option(one, functions, given, f"reward_pretrain{len(places['reward_pretrain']) or ''}")
        if option == "reward_verifier" and weight is not None:
            text, weight = f"{text.rpartition(':')[0] or text}:{weight:g}", None
        places[option].append((text, weight))
    chosen: dict[str, Any] = {name: ",".join(text for text, _ in found) for name, found in places.items() if found}
    if weights[0] is not None:
        chosen["reward_weights"] = [*_in_order(places), *weights[len(rewards) :]] or None
    return chosen, functions


def argument_names(names: Mapping[str, str], reward: Any) -> dict[str, str]:
    """The names of a call's arguments by option, with those of objects that are no option's value."""
    own = {name: name for name in ("reward", "tokenizer", "on_iteration")}
    return {**own, **names, **(dict.fromkeys(OPTIONS, "reward") if reward is not None else {})}


def _option(reward: Any, functions: dict[str, Callable[..., Any]], given: GivenFiles, name: str) -> tuple[str, str]:
    """`name`: of the folder, if it is a model."""
    if is_model(reward):
        return "reward_pretrain", given.model(name, reward, None)
    if callable(reward):
        name = base = getattr(reward, "__name__", type(reward).__name__).strip("<>")
        while name in functions:
            name = f"{base}_{len(functions) + 1}"
        functions[name] = reward
        return "reward_func", f"{GIVEN}{name}"
    if not isinstance(reward, str | os.PathLike):
        raise UserError(
            "reward takes a function, FILE.py:FUNCTION, a verifier's name, a model or its folder, or an address, not "
            f"{type(reward).__name__}"
        )
    text = os.fspath(reward)
    if text.startswith(("http://", "https://")):
        return "remote_rm_url", text
    if text.endswith(".py") or ".py:" in text:
        return "reward_func", text
    from trimtab.rewards.verifiers import VERIFIERS

    name = text.partition("(")[0].partition(":")[0].partition(",")[0].strip()
    if os.path.exists(os.path.expanduser(text)) or "/" in name:
        return "reward_pretrain", text
    if name not in VERIFIERS:
        close = difflib.get_close_matches(name, VERIFIERS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(
            f"reward {text!r} is neither a verifier nor a folder: {hint}A reward is a function, FILE.py:FUNCTION, a "
            f"verifier ({', '.join(VERIFIERS)}), a reward model (loaded, a folder or owner/name; a hub name without an "
            "owner is given as reward_pretrain=), or an address (http://...)"
        )
    return "reward_verifier", text


def _weights(wanted: Any, count: int) -> list[float | None]:
    if wanted is None:
        return [None] * count
    weights = [wanted] if isinstance(wanted, int | float | str) else list(wanted)
    if len(weights) != count:
        raise UserError(f"--reward_weights has {len(weights)} numbers for {count} rewards: give one for each")
    try:
        return [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise UserError(f"--reward_weights takes numbers, not {wanted!r:.60}") from None


def _in_order(places: Mapping[str, Sequence[tuple[str, float | None]]]) -> list[float | None]:
    servers = {weight for _, weight in places["remote_rm_url"]}
    if len(servers) > 1:
        raise UserError("--reward_weights: servers share the samples and are one reward; give them one weight")
    return [weight for name in OPTIONS[:2] for _, weight in places[name]] + list(servers)


# ---- arguments as options

DATA = ("prompt_data", "dataset", "eval_dataset", "pretrain_data", "heldout_prompt_data")


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: options, files of objects, functions."""

    values: dict[str, Any]
    """Options by their names, as `parse_values` takes them."""
    given: GivenFiles
    functions: dict[str, Callable[..., Any]]
    """Functions of this process that the options name as rewards."""


@contextmanager
def job_arguments(
    job_class: type[CallOptions],
    options: dict[str, Any],
    named: dict[str, Any],
    *,
    tokenizer: Any = None,
    reward: Any = None,
    environment: Any = None,
    tools: Sequence[Callable[..., Any]] = (),
    names: Mapping[str, str] | None = None,
) -> Iterator[Arguments]:
    """The arguments of a call as options of a job; files that were not moved to a run are gone at the end.

    `named`: arguments by the options that they stand for, None meaning unset; `names`: what the caller calls them.
    """
    named = {name: value for name, value in named.items() if value is not None}
    options = _under_own_names(job_class, options, named)
    # A mistyped name is reported before anything is written.
    checked = {name: v for name, v in options.items() if find(job_class, name) is None or not _is_object(name, v)}
    parse_values(job_class, checked, names)
    with TemporaryDirectory(prefix="trimtab-given-", ignore_cleanup_errors=True) as temporary:
        given = GivenFiles(Path(temporary))
        rewards, functions = reward_options(reward, options, given)
        values = {**named, **options, **rewards}
        if environment is not None or tools:
            values |= given.environment(environment, tools)
        known = options_of(job_class).get("input_key")
        column = str(values.get("input_key") or (known.default if known else "input"))
        for name, value in values.items():
            if name in DATA and value is not None:
                values[name] = given.rows(name, value, column, values.get("max_samples"))
            elif name == "pretrain":
                values[name] = given.model(name, value, tokenizer)
            elif is_model(value):
                # With its own tokenizer, if it names its folder.
                values[name] = given.model(name, value, None if getattr(value, "name_or_path", "") else tokenizer)
        yield Arguments(values, given, functions)


def _under_own_names(job_class: type[CallOptions], options: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    """Options under their own names; none of them may be an argument too."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        option = find(job_class, name)
        own = option.name if option is not None else name
        if own in named:
            raise UserError(f"{name} is given twice: as an argument and as an option")
        # Aliases that change an option's meaning keep their name.
        found[name if option is None or name in PER_DEVICE or own in found else own] = value
    return found


def _is_object(name: str, value: Any) -> bool:
    return is_model(value) or (name in DATA and not isinstance(value, str))


# A command for the shell stays one. Behind a flag may be its value: numbers, True, False, None, a placeholder, a quote.
_FLAG = re.compile(r"\b(?:trimtab [a-z-]+ --|python -m )[^;,()]*|--([a-z]\w*)")
_VALUE = re.compile(r" ((?:-?\d[\w.+-]* ?\b)+|True|False|None|[A-Z]{2}[\w.:]*|'[^']*')(?![\w/])")
_WORD = re.compile(r" ([\w.-]+)")
_PLACE = re.compile(r" (\S+)(?=: )")


def as_arguments(text: str, job_class: type, names: Mapping[str, str]) -> str:
    """A text about options of a command in the words of a call: `--max_len 8` is `max_len=8`, a switch `bf16=True`.
    `names`: arguments of the call by the options that they stand for."""
    told, end = "", 0
    for found in _FLAG.finditer(text):
        option = find(job_class, found[1]) if found[1] else None
        if option is None and found[1] not in names:
            continue
        told += text[end : found.start()] + names.get(option.name if option else found[1], found[1])
        # What a sentence is about is named as it is; what is to be given has its sign.
        is_subject = not found.start() or text[: found.start()].endswith((": ", "; "))
        value = _value_behind(text, found.end(), option, is_subject)
        end = found.end() if value is None else value.end()
        if value is not None:
            told += f"={_in_brackets(value[1])}"
        elif not is_subject:
            told += "=True" if option is not None and option.kind is bool else "="
    return told + text[end:]


def _value_behind(text: str, start: int, option: Option | None, is_subject: bool) -> re.Match[str] | None:
    word = _WORD.match(text, start)
    if word and option is not None and word[1] in option.limits.choices:
        return word
    return _VALUE.match(text, start) or (_PLACE.match(text, start) if is_subject else None)


def _in_brackets(value: str) -> str:
    numbers = value.split() if value[0] in "-0123456789" else []
    return f"({', '.join(numbers)})" if len(numbers) > 1 else value
