"""Between tokens and messages, for an episode's tools."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.agents.appending import Appending, PlainText, encoded, tail_of
from trimtab.agents.parsing import Parsing
from trimtab.agents.settings import PlaySettings
from trimtab.data.chat import ChatRenderer
from trimtab.envs.types import Message
from trimtab.errors import UserError

CUT = "\n[... {} tokens are left out here ...]\n"


class CannotSay(Exception):
    """The chat template refuses what an environment says."""


class Language:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]],
        stops: Collection[int],
        settings: PlaySettings,
    ):
        self.tokenizer, self.tools, self.stops = tokenizer, list(tools), frozenset(stops)
        self.vocabulary = len(tokenizer)
        self.most = settings.observation_max_len
        self.parsing = Parsing(tokenizer, self.tools)
        self.renderer: ChatRenderer | None = None
        if settings.plain and (self.tools or settings.history == "template"):
            what = "tools" if self.tools else "--agent_history template"
            raise UserError(f"{what}: prompts must be rendered by a chat template for that: --apply_chat_template")
        self.opener: Appending | PlainText | None = None
        if settings.plain:
            self.opener = PlainText(tokenizer)
        elif settings.history == "append":
            self.opener = Appending(tokenizer, self.tools, sorted(self.stops))
        else:
            self.renderer = ChatRenderer(tokenizer)

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation up to where the model is to speak."""
        with refusing():
            if self.opener is not None:
                return self.opener.opening(messages)
            return encoded(self.tokenizer, self._text(messages))

    def behind(
        self, ids: list[int], turn: list[int], before: Sequence[Message], new: Sequence[Message]
    ) -> list[int] | None:
        """What comes behind these tokens, whose last are the model's turn. `before`: the whole conversation up to that
        turn, and with it. None: the template writes that conversation otherwise than these tokens do."""
        with refusing():
            if self.opener is not None:
                return tail_of(self.opener, turn, new, self.stops)
            text = self._text([*before, *new])
        written = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        # Other tokens may say the same, and stay as they were drawn.
        return encoded(self.tokenizer, text[len(written) :]) if text.startswith(written) else None

    def _text(self, messages: Sequence[Message]) -> str:
        assert self.renderer is not None, "a template renders it"
        return self.renderer.render_prompt(list(messages), tools=self.tools or None, where="an episode")

    def shortened(self, messages: Sequence[Message]) -> list[Message]:
        """What the world says at a time, the middle cut out of what is too long."""
        if self.most is None:
            return list(messages)
        texts = {place: content for place, m in enumerate(messages) if isinstance(content := m.get("content"), str)}
        ids = {place: encoded(self.tokenizer, text) for place, text in texts.items()}
        if sum(map(len, ids.values())) <= self.most:
            return list(messages)
        level = _level([len(own) for own in ids.values()], self.most)
        return [
            {**message, "content": self._cut(ids[place], level)} if len(ids.get(place, ())) > level else message
            for place, message in enumerate(messages)
        ]

    def _cut(self, ids: list[int], most: int) -> str:
        mark = CUT.format(f"{len(ids):,}")
        keep = max(0, most - len(encoded(self.tokenizer, mark)))
        head, tail = ids[: keep - keep // 2], ids[len(ids) - keep // 2 :]
        mark = CUT.format(f"{len(ids) - keep:,}")
        return self._words(head) + mark + self._words(tail)

    def _words(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise CannotSay(f"what the environment says cannot be read: {error}") from error


def _level(lengths: list[int], most: int) -> int:
    """The greatest length to which all may be cut so that they have no more than so many together."""
    left = most
    for rank, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - rank)
        if length > share:
            return share
        left -= length
    return most
