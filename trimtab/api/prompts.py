"""Prompts as a Learner takes them: texts, conversations or token ids, each as the tokens that the model reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.data.chat import ChatRenderer, render_pair
from trimtab.data.tokenising import tokenise
from trimtab.data.tokenizer import encode_text
from trimtab.envs.types import Message
from trimtab.errors import UserError

Prompt = str | list[Message] | list[int]


class Prompts:
    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._renderer: ChatRenderer | None = None

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        if isinstance(prompts, str) or _is_conversation(prompts):
            raise UserError("prompts is one prompt; give a list of them: [prompt]")
        try:
            found = list(prompts)
        except TypeError:
            raise UserError(f"prompts is of type {type(prompts).__name__}; give a list of them") from None
        if not found:
            raise UserError("prompts is empty; give at least one")
        if all(isinstance(one, int) for one in found):
            raise UserError("prompts is one list of token ids; give a list of such lists: [ids]")
        return [self.ids(prompt, f"prompts[{number}]") for number, prompt in enumerate(found)]

    def ids(self, prompt: Any, where: str) -> list[int]:
        if isinstance(prompt, str):
            return encode_text(self._needed(where), prompt)
        if _is_conversation(prompt):
            return encode_text(self._needed(where), self.renderer(where).render_prompt(list(prompt), where=where))
        try:
            found = [int(one) for one in prompt]
        except (TypeError, ValueError):
            found = []
        if not found:
            raise UserError(f"{where} must be a text, a list of messages or a list of token ids, not {prompt!r:.60}")
        return found

    def demonstration(self, conversation: Sequence[Message] | tuple[str, str], where: str) -> tuple[list[int], Any]:
        """The tokens of a conversation that ends with the assistant, or of a prompt and its answer; and which of them
        are the answer's."""
        tokenizer = self._needed(where)
        if _is_conversation(conversation):
            rendering = self.renderer(where).render(list(conversation), where=where)  # type: ignore[arg-type]
        elif isinstance(conversation, tuple) and [type(part) for part in conversation] == [str, str]:
            prompt, answer = conversation
            rendering = render_pair(prompt, answer, tokenizer, None)
        else:
            raise UserError(f"{where} must be a list of messages, or a tuple of a prompt and its answer")
        ((ids, trained),) = tokenise([rendering], tokenizer)
        return ids.tolist(), trained

    def renderer(self, where: str) -> ChatRenderer:
        if not self._needed(where).chat_template:
            raise UserError(
                f"{where} is a conversation, and the tokenizer has no chat template; give a text, or set one"
            )
        self._renderer = self._renderer or ChatRenderer(self.tokenizer)
        return self._renderer

    def _needed(self, where: str) -> Any:
        if self.tokenizer is None:
            raise UserError(f"{where} is a text, and the Learner has no tokenizer; give it one, or give token ids")
        return self.tokenizer


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(one, Mapping) for one in prompt)
