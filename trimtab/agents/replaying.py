"""Another instance of an environment is told the turns that were answered before. It must answer alike."""

from collections.abc import Sequence

from trimtab.envs.episode import Said
from trimtab.envs.types import Message, Step


def next_known(said: Sequence[Said], since: int) -> int | None:
    """The place of the next turn of the model whose answer is known."""
    return next((p for p in range(since, len(said) - 1) if said[p].drawn and not said[p + 1].drawn), None)


def same(answer: Said, tokens: list[int], step: Step, messages: list[Message]) -> bool:
    """Whether a step says what was said then, in messages or in tokens of its own."""
    if step.done or step.truncated:
        return False
    return step.ids == tokens if step.ids is not None else messages == answer.messages
