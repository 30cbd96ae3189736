"""Turns: drawn by the engine, told to the environment, and what it answers, read."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from trimtab.agents.language import CannotSay, refusing
from trimtab.agents.play import Moment, Play, Stage, Strand
from trimtab.agents.replaying import words_of
from trimtab.envs.replies import Stepped
from trimtab.envs.types import Message, Step, Turn
from trimtab.rollout.episode import Said
from trimtab.rollout.sampling import request_seed
from trimtab.rollout.trajectory import Draft, Rollout

if TYPE_CHECKING:
    from trimtab.agents.session import AgentSession


class Turns:
    """Of a session's episodes."""

    def __init__(self, session: "AgentSession"):
        self.session = session

    def conversation(self, play: Play, count: int | None = None) -> list[Message]:
        """Everything up to now, or the first so many things that were said."""
        first = play.task.asked if play.opening is None else play.opening
        return [*first, *(message for said in play.now.said[:count] for message in said.messages)]

    def write(self, play: Play) -> None:
        """Have the next turn drawn, if there is room for it."""
        own = play.next_sampling or {}
        strand, part = play.strand, play.now.part
        limit = min(own.get("max_new_tokens") or play.limit, self.session.longest - strand.length)
        if limit < 1:
            self.session.end(play, "context")
            return
        stops = own.get("stop_strings")
        with refusing():
            request = self.session.inner.add(
                strand.ids,
                seed=request_seed(play.seed, play.now.turns),
                limit=limit,
                drafts=None if part is None else [replace(part, sample=0)],
                sampling=replace(self.session.sampling, n=1, stop_strings=tuple(stops)) if stops else None,
            )
        play.stage, play.since = Stage.WRITING, time.monotonic()
        play.now = Moment(play.now.strands, play.now.said, request, part)
        self.session.writing[request] = play

    def wrote(self, play: Play, rollout: Rollout) -> None:
        assert play.language is not None and rollout.finish in ("stop", "length")
        strand, parsing, stops = play.strand, play.language.parsing, play.language.stops
        message, text = parsing.turn(rollout.ids, strand.ids, stops)
        start, branch = len(strand.tokens), len(play.now.strands) - 1
        said = Said(
            *([message], start, start + len(rollout.ids), True, text, rollout.finish),
            seconds=time.monotonic() - play.since,
            branch=branch,
        )
        wrote = strand.wrote(Draft.of(rollout), rollout.plain_log_probs)
        play.said(said, strands=(*play.now.strands[:-1], wrote))
        self.tell(play, len(play.now.said) - 1)

    def tell(self, play: Play, place: int) -> None:
        """Tell the environment a turn."""
        said = play.now.said[place]
        strand = play.now.strands[said.branch]
        number = sum([earlier.drawn for earlier in play.now.said[:place]])
        room = max(0, self.session.longest - len(strand.prompt_ids) - said.end)
        finish: Literal["stop", "length"] = "length" if said.finish == "length" else "stop"
        ids = strand.tokens[said.start : said.end].tolist()
        if place == len(play.now.said) - 1:
            play.stage = Stage.STEPPING
        self.session.engine.pool.step(play.number, Turn(said.text, said.messages[0], ids, finish, number, room))

    def answered(self, play: Play, reply: Stepped) -> None:
        assert play.language is not None
        step = reply.step
        play.last_tools = {name: getattr(reply, name) for name in ("tool_calls", "tool_failures", "unknown_tools")}
        play.logs.update(step.logs)
        play.rewarded(step.reward)
        if step.done:
            self.session.end(play, "length" if play.now.said[-1].finish == "length" else "stop")
        elif step.truncated:
            self.session.end(play, "truncated")
        elif play.now.turns >= self.session.engine.settings.max_turns:
            self.session.end(play, "turns")
        else:
            self._read(play, step, reply.seconds)

    def _read(self, play: Play, step: Step, seconds: float) -> None:
        """What the environment says, if there is room for it and a token more."""
        assert play.language is not None
        messages, strand, strands = words_of(step, play), play.strand, play.now.strands
        turn = play.now.said[-1]
        ids = step.ids
        if ids is None:
            drawn = strand.tokens[turn.start : turn.end].tolist()
            ids = play.language.behind(strand.ids, drawn, self.conversation(play), messages)
        elif not all(0 <= token < play.language.vocabulary for token in ids):
            raise CannotSay(
                f"Step.ids has tokens that the tokenizer does not have: 0 to {play.language.vocabulary - 1}"
            )
        if ids is not None:
            strands, read = strands[:-1], strand.read(ids)
        else:
            whole = play.language.opening([*self.conversation(play), *messages])
            prompt = strands[0].prompt_ids
            kept = len(prompt) if whole[: len(prompt)] == prompt else 1
            read = Strand.of(prompt if kept > 1 else whole[:1]).read(whole[kept:])
        if read.length + 1 > self.session.longest:
            self.session.end(play, "context")
            return
        branch = len(strands)
        start = len(strand.tokens) if branch == turn.branch else 0
        said = Said(messages, start, len(read.tokens), False, seconds=seconds, branch=branch)
        play.said(said, strands=(*strands, read))
        play.count_tools()
        play.next_sampling = step.sampling
        self.write(play)
