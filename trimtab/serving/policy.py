"""The model that is served, as requests see it: its name, its room, its words."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.agents.appending import Appending, encoded
from trimtab.agents.parsing import Parsing
from trimtab.data.chat import ChatRenderer
from trimtab.data.tokenizer import decodes_fast, texts_of
from trimtab.envs.types import Message
from trimtab.errors import UserError
from trimtab.rollout.types import Rollout
from trimtab.serving.messages import history_keys
from trimtab.serving.records import Record, RecordedTurn
from trimtab.serving.refusals import NotUnderstood, no_room
from trimtab.serving.token_names import TokenNames
from trimtab.serving.wanted import House

MOST_STAGES = 64  # kinds of conversations that are remembered


@dataclass(frozen=True)
class Conversation:
    """A prompt that was made of messages."""

    ids: list[int]
    before: RecordedTurn | None  # what it goes on from, token by token
    said: list[Message]  # since then
    messages: list[Message]
    stage: "Stage"


class Stage:
    """Conversations with the same tools and the same settings of the template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: list[dict[str, Any]],
        settings: dict[str, Any],
        stops: Sequence[int],
    ):
        self.about = [tools, settings]
        self.tools = tools or None
        self.parsing = Parsing(tokenizer, tools)
        self.renderer = ChatRenderer(tokenizer, settings=settings)
        self.appending: Appending | None
        try:
            self.appending = Appending(tokenizer, tools, stops, settings)
        except UserError as error:
            self.appending, self.why_not = None, str(error)

    def keys(self, messages: Sequence[Message]) -> list[bytes]:
        return history_keys(messages, self.about)


class ServedPolicy:
    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, house: House, most_tokens: int):
        """`most_tokens`: of a prompt with its answer."""
        self.name, self.tokenizer, self.house, self.most_tokens = name, tokenizer, house, most_tokens
        self._stages: OrderedDict[str, Stage] = OrderedDict()
        self.names = TokenNames(lambda token: self.text([token], special=True))
        # A text with more characters than this has more tokens than there is room for, without a look at it.
        self.most_characters = most_tokens * max(map(len, tokenizer.get_vocab()), default=1)

    def stage(self, tools: list[dict[str, Any]], settings: dict[str, Any]) -> Stage:
        if not self.tokenizer.chat_template:
            raise NotUnderstood("the model has no chat template; ask /v1/completions", "messages")
        key = json.dumps([tools, settings], sort_keys=True)
        if key not in self._stages:
            self._stages[key] = Stage(self.tokenizer, tools, settings, self.house.stops)
            if len(self._stages) > MOST_STAGES:
                self._stages.popitem(last=False)
        self._stages.move_to_end(key)
        return self._stages[key]

    def encode(self, text: str, param: str, *, special: bool = False) -> list[int]:
        """`special`: with what the tokenizer puts around every text."""
        if len(text) > self.most_characters:
            raise no_room(self.most_tokens, len(text), param)
        return self.tokenizer.encode(text, add_special_tokens=special, verbose=False)

    def conversation(self, messages: list[Message], stage: Stage, record: Record | None) -> Conversation:
        """The tokens that these messages are. What the model said of them in this session stands there as it was
        drawn, and what others have said since is put behind it."""
        if sum(len(message["content"]) for message in messages) > self.most_characters:
            raise no_room(self.most_tokens, self.most_characters, "messages")
        if record is not None and stage.appending is not None:
            found = record.said_before(stage.keys(messages))
            if found is not None:
                count, before = found
                said = messages[count:]
                if said and all(message["role"] in ("user", "tool") for message in said):
                    try:
                        tail = stage.appending.after(said, before.ended)
                    except UserError:
                        pass  # as a whole it may be rendered, or the reason be clearer
                    else:
                        return Conversation(before.ids + tail, before, said, messages, stage)
        try:
            text = stage.renderer.render_prompt(messages, tools=stage.tools, where="messages")
        except UserError as error:
            raise NotUnderstood(str(error), "messages") from None
        return Conversation(encoded(self.tokenizer, text), None, messages, messages, stage)

    def check_ids(self, ids: list[int], param: str) -> None:
        if min(ids) < 0 or max(ids) >= self.house.vocabulary:
            raise NotUnderstood(f"{param} has a token id that is not below {self.house.vocabulary}", param)

    def room(self, prompt_ids: list[int], param: str) -> int:
        """For the tokens of an answer."""
        if not prompt_ids:
            raise NotUnderstood(f"{param} has no token; at least one is needed", param)
        self.check_ids(prompt_ids, param)
        room = self.most_tokens - len(prompt_ids)
        if room < 1:
            raise no_room(self.most_tokens, len(prompt_ids), param)
        return room

    def ended(self, rollout: Rollout) -> bool:
        """Whether its last token is one that ends turns."""
        return bool(rollout.ids) and rollout.ids[-1] in self.house.stops

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """`special`: with the names of special tokens."""
        if special or self.tokenizer.clean_up_tokenization_spaces:
            return self.tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return texts_of(self.tokenizer, [list(ids)])[0]

    def name_all(self) -> None:
        """Every token has its name ready, and texts their table. Other tokenizers than fast ones take long, and may
        refuse the places of a head that are no tokens: they are asked for what is drawn."""
        self.text([0])
        if decodes_fast(self.tokenizer):
            alone = [[token] for token in range(self.house.vocabulary)]
            self.names.learn(self.tokenizer.backend_tokenizer.decode_batch(alone, skip_special_tokens=False))
