"""Verbs that read a line a turn, from a terminal or a pipe; /help says what else can be typed.

`trimtab chat`, or `python -m trimtab.cli.interactive_chat`: a conversation with a model. Ctrl-C stops the answer
that is being written, not the program.

`trimtab play ENV [--model MODEL] [option ...]`: an environment, played by a person or a model. ENV is a file (FILE.py
or FILE.py:NAME) or a name such as trimtab:guess. Everything is shown as training sees it: the messages, which tokens
the model drew and which it only read, and the reward of each turn.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trimtab.cli.main import enable_line_editing, read_line, run_job
from trimtab.config.data_options import SOURCES
from trimtab.config.jobs import ChatOptions, PlayOptions
from trimtab.errors import RunFailed, UserError
from trimtab.job import say

if TYPE_CHECKING:
    from rich.table import Table

    from trimtab.envs.types import Message, Task
    from trimtab.evaluate.interactive import Heard, Over, Playing
    from trimtab.rollout.trajectory import Trajectory


# ---- chat

HELP = "/clear begins anew, /quit or Ctrl-D leaves, Ctrl-C stops an answer; everything else is said to the model"


def main(argv: Sequence[str] | None = None) -> int:
    return run_job(ChatOptions, argv, talk)


def talk(options: ChatOptions) -> None:
    from trimtab.evaluate.interactive import Conversation

    conversation = Conversation(options)
    if sys.stdin.isatty():
        enable_line_editing()
        form = "its chat template" if conversation.as_chat else "--input_template"
        say(f"{options.pretrain}, with {form}. {HELP}.")
    while True:
        try:
            words = read_line()
        except EOFError:
            return
        except KeyboardInterrupt:
            say("\n/quit or Ctrl-D leaves")
            continue
        if words == "/quit":
            return
        if words == "/help":
            say(HELP)
        elif words == "/clear":
            conversation.clear()
        elif words:
            _answer(conversation, words)


def _answer(conversation, words: str) -> None:
    try:
        finish = conversation.ask(words, lambda text: print(text, end="", flush=True))
    except UserError as error:
        say(f"trimtab chat: {error}")
        return
    print(flush=True)
    if finish == "length":
        say(f"trimtab chat: the answer ends here, at {conversation.most_tokens} tokens; /clear begins anew")


# ---- play

PLAY_HELP = (
    "what you type is your turn; /NAME {JSON} or /NAME key=value ... calls a tool, /tools lists them, /quit or Ctrl-D "
    "leaves"
)


class PlayerLeft(Exception):
    """The person ended the session."""


def play_main(argv: Sequence[str] | None = None) -> int:
    return run_job(PlayOptions, in_options(sys.argv[1:] if argv is None else argv), play)


def in_options(words: Sequence[str]) -> list[str]:
    """The words with a leading environment and --model replaced by the options that they stand for."""
    words = list(words)
    if words and not words[0].startswith("-"):
        of_library = words[0].partition(":")[0] in SOURCES
        words[:1] = ["--environment" if of_library or ".py" not in words[0] else "--agent_func_path", words[0]]
    return ["--pretrain" + word.removeprefix("--model") if word.split("=")[0] == "--model" else word for word in words]


def play(options: PlayOptions) -> None:
    from trimtab.evaluate.interactive import Heard, Playing

    person = PersonTurns()
    playing = Playing(options, person.ask)
    view = EpisodeView(playing, tokens=options.tokens)
    person.tools, person.written = playing.info.tools, playing.written
    try:
        view.introduce()
        if playing.by_person and sys.stdin.isatty():
            enable_line_editing()
            say(PLAY_HELP)
        for task in playing.tasks():
            view.open(task)
            for found in playing.play(task):
                if isinstance(found, Heard):
                    view.show(found)
                    continue
                view.close(found)
                if found.finish == "failed":
                    where = f"environment {options.environment_source}, row {task.row}"
                    raise RunFailed(f"{where}: {found.episode.problem}")
    except PlayerLeft:
        pass
    finally:
        playing.close()


class PersonTurns:
    """A person's turns, read as one line each."""

    def __init__(self) -> None:
        self.tools: list[dict] = []
        self.written: Callable[[str, dict], str] = lambda name, arguments: name

    def ask(self) -> str:
        while True:
            try:
                words = read_line()
            except EOFError:
                raise PlayerLeft from None
            if words == "/quit":
                raise PlayerLeft
            if words == "/help":
                say(PLAY_HELP)
            elif words == "/tools":
                say("\n".join(map(_described, self.tools)) or "it has none")
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
            return name, json.loads(rest)
        except ValueError as error:
            raise UserError(f"/{name}: what follows is no JSON ({error})") from None
    pairs = [word.partition("=") for word in rest.split()]
    if not all(equals for _, equals, _ in pairs):
        raise UserError(f"/{name}: write its arguments as key=value, or as JSON in braces")
    return name, {key: _value(text, types.get(key, {}).get("type")) for key, _, text in pairs}


def _value(text: str, kind: object) -> Any:
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


# ---- how an episode looks in a terminal

ENDS = {
    "stop": "over",
    "length": "over with a turn that was cut at --max_new_tokens",
    "truncated": "cut off by the environment",
    "turns": "no turns left (--max_turns)",
    "context": "no room left (--episode_max_len)",
    "failed": "the environment failed",
}
HIDDEN = {"turns", "episode_length", "branches", "seconds_environment"}
"""Figures that are shown in other words, or that the machine adds."""
DRAWN, READ = "bold green", "dim"


class EpisodeView:
    """Turns with their figures, and the tokens, marked where they carry loss."""

    def __init__(self, playing: Playing, *, tokens: bool):
        from rich.console import Console

        self.playing, self.every_token = playing, tokens
        self.with_tokens = bool(playing.options.pretrain)
        self.console = Console(highlight=False)
        self.player = "you" if playing.by_person else "model"

    def introduce(self) -> None:
        about = self.playing.info
        names = ", ".join(tool["function"]["name"] for tool in about.tools)
        player = "you play" if self.playing.by_person else f"{self.playing.options.pretrain} plays"
        tools = f", with tools: {names}" if names else ""
        self._line((about.name, "bold"), f" ({about.shape}){tools}; {player}")

    def open(self, task: Task) -> None:
        self._line("")
        label = "" if task.label is None or self.playing.by_person else f", label {task.label}"
        self._line((f"row {task.row}, seed {task.seed}{label}", READ))

    def show(self, heard: Heard) -> None:
        said = heard.said
        facts = []
        if heard.ids and self.with_tokens:
            facts.append(f"{_counted(len(heard.ids), 'token')} {'drawn' if said.drawn else 'read'}")
        if said.seconds >= 0.1 and not (said.drawn and self.playing.by_person):
            facts.append(f"{said.seconds:.1f} s")
        if said.finish == "length":
            facts.append("cut at its limit")
        role = self.player if said.drawn else str(said.messages[0]["role"]) if said.messages else "world"
        self._line(
            (f"{role:>9}  ", DRAWN if said.drawn else READ),
            (said.text if said.drawn else words_of(said.messages)) or "(nothing)",
            (f"  {said.reward:+g}" if said.drawn and said.reward else "", "bold"),
            (f"  {', '.join(facts)}" if facts else "", READ),
        )

    def close(self, over: Over) -> None:
        episode, sequences = over.episode, over.sequences
        whole, drawn = (sum(map(len, found)) for found in zip(*((s.whole_ids, s.log_probs) for s in sequences)))
        facts = [_counted(len(episode.turns), "turn")]
        facts += [f"{_counted(whole, 'token')}, of which {drawn} carry loss"] if self.with_tokens else []
        facts += [_counted(len(sequences), "sequence")] if len(sequences) > 1 else []
        facts += [f"begun {episode.begun} times"] if episode.begun > 1 else []
        facts += [f"{name} {value:g}" for name, value in episode.logs.items() if value and name not in HIDDEN]
        worth = "no reward" if over.finish == "failed" else f"reward {episode.reward:g}"
        self._line(
            (f"{ENDS.get(over.finish, over.finish)}: {worth}", "bold"),
            f" ({episode.last_reward:+g} for the whole)" if episode.last_reward else "",
            (f"  {', '.join(facts)}", READ),
        )
        for sequence in sequences if self.with_tokens else ():
            self._line(*self.strip(sequence))
            if self.every_token:
                self.console.print(self.table(sequence))

    def strip(self, sequence: Trajectory) -> Iterator[str | tuple[str, str]]:
        """The whole context of the model; the tokens that it drew, which carry loss, in brackets and separated."""
        decode = self.playing.tokenizer.decode
        yield "  "
        for drawn, run in itertools.groupby(_masked(sequence), key=lambda token: token[0]):
            ids = [token for _, token in run]
            shown = f"[{'|'.join(decode([token]) for token in ids)}]" if drawn else decode(ids)
            yield shown.replace("\n", "⏎"), DRAWN if drawn else READ

    def table(self, sequence: Trajectory) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table("place", "id", "token", "drawn", "log-prob", box=None, padding=(0, 2, 0, 0), header_style="bold")
        log_probs = iter(sequence.log_probs)
        for place, (drawn, token) in enumerate(_masked(sequence)):
            piece = self.playing.tokenizer.decode([token]).replace("\n", "⏎")
            cells = (str(place), str(token), piece, *(("yes", f"{next(log_probs):.4f}") if drawn else ("", "")))
            table.add_row(*(Text(cell, DRAWN if drawn else READ) for cell in cells))
        return table

    def _line(self, *parts: str | tuple[str, str]) -> None:
        from rich.text import Text

        self.console.print(Text.assemble(*parts), soft_wrap=True)


def _masked(sequence: Trajectory) -> Iterator[tuple[bool, int]]:
    """Every token, prompt and all, and whether the model drew it."""
    return zip([False] * len(sequence.prompt_ids) + sequence.mask.tolist(), sequence.whole_ids)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def words_of(messages: Sequence[Message]) -> str:
    contents = [message.get("content") for message in messages]
    return "\n".join(content if isinstance(content, str) else str(content) for content in contents if content)


if __name__ == "__main__":
    raise SystemExit(main())
