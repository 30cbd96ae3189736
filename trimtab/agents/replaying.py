"""Another instance of an environment is told the turns that were answered before. It must answer alike."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trimtab.agents.play import Play, Stage, Strand
from trimtab.envs.replies import Stepped
from trimtab.envs.types import Message, Step
from trimtab.rollout.episode import Said

if TYPE_CHECKING:
    from trimtab.agents.session import AgentSession


class Replaying:
    """Of a session's episodes."""

    def __init__(self, session: "AgentSession"):
        self.session = session

    def with_prompts(self, play: Play, prompt: list[int]) -> tuple[Strand, ...]:
        """Of sequences that come from drafts: each begins with the conversation as it was rendered then."""
        strands = [replace(play.now.strands[0], prompt_ids=prompt)]
        for branch, strand in enumerate(play.now.strands[1:], start=1):
            place = next(index for index, said in enumerate(play.now.said) if said.branch == branch)
            assert play.language is not None
            ids = play.language.opening(self.session.turns.conversation(play, place + 1))
            strands.append(replace(strand, prompt_ids=ids[: len(ids) - play.now.said[place].end]))
        return tuple(strands)

    def go_on(self, play: Play) -> None:
        """Tell a new instance the next turn that has been answered, or go on."""
        place = next_known(play.now.said, play.replayed)
        if place is not None:
            play.stage = Stage.REPLAYING
            self.session.turns.tell(play, place)
        elif play.now.said and play.now.said[-1].drawn:
            self.session.turns.tell(play, len(play.now.said) - 1)
        else:
            self.session.turns.write(play)

    def answered(self, play: Play, reply: Stepped) -> None:
        place = next_known(play.now.said, play.replayed)
        assert place is not None
        answer = play.now.said[place + 1]
        tokens = play.now.strands[answer.branch].tokens[answer.start : answer.end].tolist()
        if same(answer, tokens, reply.step, words_of(reply.step, play)):
            play.replayed, play.next_sampling = place + 2, reply.step.sampling
            self.go_on(play)
        else:
            self.begin_anew(play)

    def begin_anew(self, play: Play) -> None:
        """In another instance, from nothing."""
        self.session.engine.pool.drop(play.number)
        del self.session.under_way[play.number]
        play.number = next(self.session.engine.numbers)
        play.forget()
        self.session.open(play)


def next_known(said: Sequence[Said], since: int) -> int | None:
    """The place of the next turn of the model whose answer is known."""
    return next((p for p in range(since, len(said) - 1) if said[p].drawn and not said[p + 1].drawn), None)


def same(answer: Said, tokens: list[int], step: Step, messages: list[Message]) -> bool:
    """Whether a step says what was said then, in messages or in tokens of its own."""
    if step.done or step.truncated:
        return False
    return step.ids == tokens if step.ids is not None else messages == answer.messages


def words_of(step: Step, play: Play) -> list[Message]:
    """What is read of it."""
    assert play.language is not None
    messages = [{"role": "user", "content": step.messages}] if isinstance(step.messages, str) else step.messages
    return play.language.shortened(messages)
