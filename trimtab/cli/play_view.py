"""How `trimtab play` looks in a terminal: turns with their figures, and the tokens, marked where they carry loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimtab.envs.types import Message, Task
from trimtab.evaluate.playing import Heard, Over, Playing
from trimtab.rollout.trajectory import Trajectory

ENDS = {
    "stop": "over",
    "length": "over with a turn that was cut at --max_new_tokens",
    "truncated": "cut off by the environment",
    "turns": "no turns left (--max_turns)",
    "context": "no room left (--episode_max_len)",
    "failed": "the environment failed",
}
DRAWN, READ = "bold green", "dim"


class View:
    def __init__(self, playing: Playing, *, tokens: bool):
        self.playing, self.every_token = playing, tokens
        self.with_tokens = bool(playing.options.pretrain)
        self.console = Console(highlight=False)
        self.player = "you" if playing.by_person else "model"

    def introduce(self) -> None:
        about = self.playing.info
        names = ", ".join(tool["function"]["name"] for tool in about.tools)
        who = "you play" if self.playing.by_person else f"{self.playing.options.pretrain} plays"
        tools = f", with tools: {names}" if names else ""
        self._line(Text.assemble((about.name, "bold"), f" ({about.shape}){tools}; {who}"))

    def open(self, task: Task) -> None:
        self._line(Text(""))
        label = "" if task.label is None else f", label {task.label}"
        self._line(Text(f"row {task.row}, seed {task.seed}{label if not self.playing.by_person else ''}", READ))

    def show(self, heard: Heard) -> None:
        said = heard.said
        facts = (
            [f"{_counted(len(heard.ids), 'token')} {'drawn' if said.drawn else 'read'}"]
            if heard.ids and self.with_tokens
            else []
        )
        facts += (
            [f"{said.seconds:.1f} s"] if said.seconds >= 0.1 and not (said.drawn and self.playing.by_person) else []
        )
        facts += ["cut at its limit"] if said.finish == "length" else []
        reward = Text(f"  {said.reward:+g}", "bold") if said.drawn and said.reward else Text("")
        role = self.player if said.drawn else _role(said.messages)
        text = said.text if said.drawn else words_of(said.messages)
        self._line(
            Text.assemble((f"{role:>9}  ", DRAWN if said.drawn else READ), text or "(nothing)"),
            reward,
            Text(f"  {', '.join(facts)}" if facts else "", READ),
        )

    def close(self, over: Over) -> None:
        episode, sequences = over.episode, over.sequences
        beside = f" ({episode.last_reward:+g} for the whole)" if episode.last_reward else ""
        whole, drawn = (sum(map(len, found)) for found in zip(*((s.whole_ids, s.log_probs) for s in sequences)))
        facts = [_counted(len(episode.turns), "turn")]
        facts += [f"{_counted(whole, 'token')}, of which {drawn} carry loss"] if self.with_tokens else []
        facts += [_counted(len(sequences), "sequence")] if len(sequences) > 1 else []
        facts += [f"begun {episode.begun} times"] if episode.begun > 1 else []
        facts += [f"{name} {value:g}" for name, value in episode.logs.items() if value and name not in HIDDEN]
        worth = "no reward" if over.finish == "failed" else f"reward {episode.reward:g}"
        self._line(
            Text.assemble((f"{ENDS.get(over.finish, over.finish)}: {worth}", "bold"), beside),
            Text(f"  {', '.join(facts)}", READ),
        )
        for sequence in sequences if self.with_tokens else ():
            self._line(self.strip(sequence))
            if self.every_token:
                self.console.print(self.table(sequence))

    def strip(self, sequence: Trajectory) -> Text:
        """All that the model has before it; what it drew itself, which carries loss, in brackets and token by token."""
        found, decode = Text("  "), self.playing.tokenizer.decode
        for drawn, run in itertools.groupby(_masked(sequence), key=lambda token: token[0]):
            ids = [token for _, token in run]
            shown = f"[{'|'.join(decode([token]) for token in ids)}]" if drawn else decode(ids)
            found.append(shown.replace("\n", "⏎"), DRAWN if drawn else READ)
        return found

    def table(self, sequence: Trajectory) -> Table:
        table = Table("place", "id", "token", "drawn", "log-prob", box=None, padding=(0, 2, 0, 0), header_style="bold")
        log_probs = iter(sequence.log_probs)
        for place, (drawn, token) in enumerate(_masked(sequence)):
            piece = self.playing.tokenizer.decode([token]).replace("\n", "⏎")
            cells = (str(place), str(token), piece, *(("yes", f"{next(log_probs):.4f}") if drawn else ("", "")))
            table.add_row(*(Text(cell, DRAWN if drawn else READ) for cell in cells))
        return table

    def _line(self, *parts: Text) -> None:
        self.console.print(Text.assemble(*parts), soft_wrap=True)


HIDDEN = {"turns", "episode_length", "branches", "seconds_environment"}
"""Figures that are said in other words, or are the machine's own."""


def _masked(sequence: Trajectory) -> Iterator[tuple[bool, int]]:
    """Every token, prompt and all, and whether the model drew it."""
    return zip([False] * len(sequence.prompt_ids) + sequence.mask.tolist(), sequence.whole_ids)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _role(messages: Sequence[Message]) -> str:
    return str(messages[0]["role"]) if messages else "world"


def words_of(messages: Sequence[Message]) -> str:
    contents = [message.get("content") for message in messages]
    return "\n".join(content if isinstance(content, str) else str(content) for content in contents if content)
