"""An environment, played by a person or a model: `trimtab play ENV [--model MODEL] [option ...]`.

ENV is a file (FILE.py or FILE.py:NAME) or a name such as trimtab:guess. Everything is shown as training sees it: who
said what, which tokens were drawn and which were only read, what each turn was worth.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trimtab.cli.run import run_job
from trimtab.config.data_options import SOURCES
from trimtab.config.jobs import PlayOptions
from trimtab.errors import RunFailed, UserError
from trimtab.running.speaking import say

if TYPE_CHECKING:
    from trimtab.cli.play_view import View
    from trimtab.envs.types import Task
    from trimtab.evaluate.playing import Playing

PROMPT = "> "
HELP = (
    "what you type is your turn; /NAME {JSON} or /NAME key=value ... calls a tool, /tools lists them, /quit or Ctrl-D "
    "leaves"
)


class Left(Exception):
    """The person has had enough."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_job(PlayOptions, in_options(sys.argv[1:] if argv is None else argv), play)


def in_options(words: Sequence[str]) -> list[str]:
    """The environment that stands before all options, and --model, as the options that they are."""
    words = list(words)
    if words and not words[0].startswith("-"):
        of_library = words[0].partition(":")[0] in SOURCES
        words[:1] = ["--environment" if of_library or ".py" not in words[0] else "--agent_func_path", words[0]]
    return ["--pretrain" + word.removeprefix("--model") if word.split("=")[0] == "--model" else word for word in words]


def play(options: PlayOptions) -> None:
    from trimtab.cli.play_view import View
    from trimtab.evaluate.playing import Playing

    asking = Asking()
    playing = Playing(options, asking.ask)
    view = View(playing, tokens=options.tokens)
    asking.tools, asking.written = playing.info.tools, playing.written
    try:
        view.introduce()
        if playing.by_person and sys.stdin.isatty():
            _enable_line_editing()
            say(HELP)
        for task in playing.tasks():
            _play_one(playing, view, task)
    except Left:
        pass
    finally:
        playing.close()


def _play_one(playing: Playing, view: View, task: Task) -> None:
    from trimtab.evaluate.playing import Heard

    view.open(task)
    for found in playing.play(task):
        if isinstance(found, Heard):
            view.show(found)
        else:
            view.close(found)
            if found.finish == "failed":
                where = f"environment {playing.options.environment_source}, row {task.row}"
                raise RunFailed(f"{where}: {found.episode.problem}")


class Asking:
    """A person's turns, a line each."""

    def __init__(self) -> None:
        self.tools: list[dict] = []
        self.written: Callable[[str, dict], str] = lambda name, arguments: name

    def ask(self) -> str:
        while True:
            try:
                words = input(PROMPT if sys.stdin.isatty() else "").strip()
            except EOFError:
                raise Left from None
            if words == "/quit":
                raise Left
            if words == "/help":
                say(HELP)
            elif words == "/tools":
                say("\n".join(_described(tool) for tool in self.tools) or "it has none")
            elif words.startswith("/"):
                try:
                    return self.written(*tool_call(words[1:], self.tools))
                except UserError as error:
                    say(f"trimtab play: {error}")
            else:
                return words


def tool_call(words: str, tools: Sequence[dict]) -> tuple[str, dict]:
    """Name and arguments of `NAME {JSON}` or `NAME key=value ...`."""
    name, _, rest = words.partition(" ")
    functions = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    types = functions[0]["parameters"]["properties"] if functions else {}
    if rest.lstrip().startswith("{"):
        try:
            arguments = json.loads(rest)
        except ValueError as error:
            raise UserError(f"/{name}: what follows is no JSON ({error})") from None
    else:
        pairs = [word.partition("=") for word in rest.split()]
        if not all(equals for _, equals, _ in pairs):
            raise UserError(f"/{name}: write its arguments as key=value, or as JSON in braces")
        arguments = {key: _value(text, types.get(key, {}).get("type")) for key, _, text in pairs}
    return name, arguments


def _value(text: str, kind: object):
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _described(tool: dict) -> str:
    function = tool["function"]
    names = ", ".join(function.get("parameters", {}).get("properties", {}))
    return f"/{function['name']} ({names}): {function.get('description', '')}"


def _enable_line_editing() -> None:
    with contextlib.suppress(ImportError):  # not on every system
        import readline  # noqa: F401 (input() then has a history and arrow keys)


if __name__ == "__main__":
    raise SystemExit(main())
