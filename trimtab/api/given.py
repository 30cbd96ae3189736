"""Objects that a call was given, as files of its run: `SAVE_PATH/given/`.

So the manifest, exact resume, reports and several processes work as ever, and a command with these files is the same
run. They are made aside, and come into the run's folder once its options are found good: a call that is refused leaves
nothing behind, and sets no earlier run aside. Models, which are large, are written there at once.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, islice
from pathlib import Path
from typing import Any

from trimtab.api.environments import with_tools
from trimtab.errors import UserError
from trimtab.files import new_temporary_folder, remove, write_bytes, write_text, writing

FOLDER = "given"

_STUB = '''"""Written by Trimtab: the environment that was given in Python, in environment.pkl beside this file."""

import sys
from pathlib import Path

import dill

sys.path.extend({paths!r})
Given = dill.loads(Path(__file__).with_name("environment.pkl").read_bytes())
'''


class Given:
    """What one call was given. Paths are those aside, until `move_in`."""

    def __init__(self) -> None:
        self.aside = new_temporary_folder("trimtab-given")
        self._models: dict[str, tuple[Any, Any]] = {}

    def __bool__(self) -> bool:
        return any(self.aside.iterdir())

    def model(self, name: str, model: Any, tokenizer: Any) -> str:
        """A loaded model; `name`: the option that it stands for. A text is a place already."""
        if isinstance(model, str | os.PathLike):
            if tokenizer is not None:
                raise UserError("tokenizer: it comes with a loaded model; a folder or a name brings its own")
            return os.fspath(model)
        if not is_model(model):
            raise UserError(f"--{name} takes a folder, a name or a loaded PreTrainedModel, not {_kind(model)}")
        self._models[name] = model, tokenizer if tokenizer is not None else _tokenizer_of(model, name)
        return str(self._place(name, folder=True))

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
        place = self._place(f"{name}.jsonl")
        with writing("what was given in Python: cannot write it aside"), place.open("w", encoding="utf-8") as file:
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
        write_bytes(self._place("environment.pkl"), content)
        stub = self._place("environment.py")
        write_text(stub, _STUB.format(paths=[path or os.getcwd() for path in sys.path]))
        return {"agent_func_path": f"{stub}:Given"}

    def move_in(self, save_path: str) -> Callable[[Any], Any]:
        """Bring everything into the run's folder; what turns paths aside into those there."""
        home = Path(save_path).expanduser().resolve() / FOLDER
        if self:
            with writing(f"--save_path {save_path}: cannot write there"):
                home.mkdir(parents=True, exist_ok=True)
                for place in self.aside.iterdir():
                    remove(home / place.name)
                    if place.name in self._models:
                        _save(*self._models[place.name], home / place.name)
                    else:
                        shutil.move(place, home / place.name)

        def settled(value: Any) -> Any:
            return value.replace(str(self.aside), str(home)) if isinstance(value, str) else value

        return settled

    def close(self) -> None:
        remove(self.aside)

    def _place(self, name: str, *, folder: bool = False) -> Path:
        place = self.aside / name
        if folder:
            place.mkdir()
        return place


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
