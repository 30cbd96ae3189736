"""From which stream a request draws. Clients send one seed for all conversations and turns, so it is made of where the
turn stands as well: asked again, it is the same answer."""

import hashlib
import json
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trimtab.data.chat import ChatRenderer
from trimtab.data.tokenizer import decodes_fast, texts_of
from trimtab.envs.chat_tokens import ChatAppender, MessageParser, encoded
from trimtab.envs.types import Message
from trimtab.errors import UserError
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.rollout.trajectory import Finish, Rollout
from trimtab.server.request_params import InvalidRequest, ServerDefaults, history_keys, no_room


def stream_seed(seed: int, session: str | None, length: int) -> int:
    """`length`: tokens that stand before the turn. As int64 holds it."""
    name = f"{seed}/{'' if session is None else session}/{length}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


# ---- What was drawn in each session: exact tokens, for clients that speak in messages, and a trace


MOST_TOKENS = 2**24  # of all sessions; each takes twelve bytes
TURN = 128  # tokens that have the size of what a turn has besides


@dataclass(eq=False)
class RecordedTurn:
    number: int
    before: "RecordedTurn | None"
    read: np.ndarray  # int32: between the turn before, or the beginning, and what it drew
    rollout: Rollout
    ended: bool  # its last token is one that ends turns
    message: Message
    said: list[Message] = field(default_factory=list)  # what was read, where the client spoke in messages

    @property
    def ids(self) -> list[int]:
        """Everything up to its end."""
        parts: list[np.ndarray] = []
        turn: RecordedTurn | None = self
        while turn is not None:
            parts += [turn.rollout.tokens, turn.read]
            turn = turn.before
        return np.concatenate(parts[::-1]).tolist()

    @cached_property
    def length(self) -> int:
        """Of everything up to its end."""
        before = 0 if self.before is None else self.before.length
        return before + len(self.read) + len(self.rollout.tokens)

    @cached_property
    def digest(self) -> "hashlib.blake2b":
        """The same, so that it is known again without a look at every token."""
        found = _digest() if self.before is None else self.before.digest.copy()
        found.update(self.read.tobytes())
        found.update(self.rollout.tokens.tobytes())
        return found

    @property
    def held(self) -> int:
        return len(self.read) + len(self.rollout.tokens) + TURN

    @property
    def path(self) -> "list[RecordedTurn]":
        """The turns up to it, the first one first."""
        path: list[RecordedTurn] = []
        turn: RecordedTurn | None = self
        while turn is not None:
            path.append(turn)
            turn = turn.before
        return path[::-1]

    def trace(self) -> dict[str, Any]:
        versions = self.rollout.versions
        return {
            "turn": self.number,
            "after": None if self.before is None else self.before.number,
            "read_token_ids": self.read.tolist(),
            "token_ids": self.rollout.tokens.tolist(),
            "logprobs": self.rollout.log_probs.tolist(),
            "versions": [] if versions is None else versions.tolist(),
            "finish_reason": self.rollout.finish,
            "message": self.message,
        }


class SessionRecord:
    """Of one session."""

    def __init__(
        self, seed: int | None = None, most_turns: int | None = None, pinned: SamplingParams | None = None
    ) -> None:
        """`seed`: from which its turns draw, whatever requests say; `most_turns`: whoever asks for more is refused;
        `pinned`: how all its turns are drawn, while others may be drawn otherwise."""
        self.seed, self.most_turns, self.pinned = seed, most_turns, pinned
        self.refused: Finish | None = None  # why the last turn that was asked for was, if it was
        self._asked: Counter[int] = Counter()  # turns, by what stood before them
        self.turns: list[RecordedTurn] = []
        self.held = 0  # tokens, and as many as a turn takes besides
        self._by_history: dict[bytes, RecordedTurn] = {}
        self._by_tokens: dict[int, dict[bytes, RecordedTurn]] = {}  # by their number first

    def next_seed(self, length: int) -> int | None:
        """Of a turn before which so many tokens stand: by its place alone, and another one if it is asked for again."""
        if self.seed is None:
            return None
        self._asked[length] += 1
        return request_seed(stream_seed(self.seed, None, length), self._asked[length] - 1)

    def said_before(self, keys: Sequence[bytes]) -> tuple[int, RecordedTurn] | None:
        """The latest turn that a conversation of these beginnings has had here, and how many messages end with it."""
        for count in range(len(keys) - 1, 0, -1):
            if (turn := self._by_history.get(keys[count])) is not None:
                return count, turn
        return None

    def read_before(self, prompt_ids: list[int]) -> RecordedTurn | None:
        """The longest turn whose tokens these go on from."""
        ids, best, digest, read = np.array(prompt_ids, dtype=np.int32), None, _digest(), 0
        for length in sorted(length for length in self._by_tokens if length <= len(ids)):
            digest.update(ids[read:length].tobytes())
            read = length
            best = self._by_tokens[length].get(digest.digest(), best)
        return best

    def add(
        self,
        rollout: Rollout,
        before: RecordedTurn | None,
        message: Message,
        *,
        ended: bool,
        said: list[Message] | None = None,
        key: bytes | None = None,
    ) -> RecordedTurn:
        """`key`: of the history with this turn at its end."""
        known = 0 if before is None else before.length
        read = np.array(rollout.prompt_ids[known:], dtype=np.int32)
        kept = replace(rollout, prompt_ids=[], alternatives=None)  # what came before is in the record already
        turn = RecordedTurn(len(self.turns), before, read, kept, ended, message, said or [])
        self.turns.append(turn)
        self._by_tokens.setdefault(turn.length, {}).setdefault(turn.digest.digest(), turn)
        self.held += turn.held
        if key is not None:
            self._by_history[key] = turn
        return turn

    @property
    def ends(self) -> list[RecordedTurn]:
        return ends_of(self.turns)

    def trace(self) -> dict[str, Any]:
        branches = [[turn.number for turn in end.path] for end in self.ends]
        return {"turns": [turn.trace() for turn in self.turns], "branches": branches}


def ends_of(turns: Sequence[RecordedTurn]) -> list[RecordedTurn]:
    """The last turns of their branches, in the order in which they were drawn."""
    gone_on = {id(turn.before) for turn in turns}
    return [turn for turn in turns if id(turn) not in gone_on]


def _digest() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16)


class SessionStore:
    """Of all sessions. When they hold too much, those are forgotten that were quiet for the longest."""

    def __init__(self, most_tokens: int = MOST_TOKENS, *, invited: bool = False, private: bool = False):
        """`invited`: only sessions that were opened here may be named, and every request names one; `private`: only
        names that `issue` gave."""
        self.most_tokens, self.held, self.invited, self.private = most_tokens, 0, invited, private
        self._records: OrderedDict[str, SessionRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def find(self, session: str) -> SessionRecord | None:
        return self._records.get(session)

    def of(self, session: str | None) -> SessionRecord | None:
        """A new one for a session that nobody knows; None: nobody keeps one."""
        if self.invited and (session is None or session not in self._records):
            raise InvalidRequest("there is no such episode, or it is over", "session", status=404)
        if session is None:
            return None
        if self.private and session not in self._records:
            words = "this server names sessions itself: POST /sessions gives a name, until it is long unused"
            raise InvalidRequest(words, "session", status=404)
        record = self._records.setdefault(session, SessionRecord())
        self._records.move_to_end(session)
        return record

    def open(self, session: str, record: SessionRecord) -> None:
        self._records[session] = record

    def issue(self) -> str:
        """Open a session under a name that nobody can guess."""
        name, record = secrets.token_urlsafe(24), SessionRecord()
        record.held = TURN  # so that there is a limit to sessions without turns, too
        self.open(name, record)
        self.held += record.held
        self._make_room()
        return name

    def forget(self, session: str) -> None:
        if (record := self._records.pop(session, None)) is not None:
            self.held -= record.held

    def grown(self, session: str, turn: RecordedTurn) -> None:
        """A turn was added to this session's record, which may have been forgotten meanwhile."""
        record = self._records.get(session)
        if record is None or turn.number >= len(record.turns) or record.turns[turn.number] is not turn:
            return
        self.held += turn.held
        self._make_room()

    def _make_room(self) -> None:
        while self.held > self.most_tokens and not self.invited:
            self.forget(next(iter(self._records)))


# ---- What each token is called in replies, as text and as JSON: every log-prob that a client asks


class TokenNames(dict[int, tuple[str, str]]):
    """By tokens: the name, and the same in JSON. One that is not known yet is asked for when it is needed."""

    def __init__(self, name: Callable[[int], str]):
        super().__init__()
        self._name = name

    def __missing__(self, token: int) -> tuple[str, str]:
        name = self._name(token)
        found = self[token] = name, json.dumps(name)
        return found

    def learn(self, names: Sequence[str]) -> None:
        """Of the first so many."""
        self.update(enumerate(zip(names, map(json.dumps, names))))


# ---- The model that is served, as requests see it: its name, its room, its words.


MOST_STAGES = 64  # kinds of conversations that are remembered


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt that was made of messages."""

    ids: list[int]
    before: RecordedTurn | None  # what it goes on from, token by token
    said: list[Message]  # since then
    messages: list[Message]
    stage: "ChatFormat"


class ChatFormat:
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
        self.parsing = MessageParser(tokenizer, tools)
        self.renderer = ChatRenderer(tokenizer, settings=settings)
        self.appending: ChatAppender | None
        try:
            self.appending = ChatAppender(tokenizer, tools, stops, settings)
        except UserError as error:
            self.appending, self.why_not = None, str(error)

    def keys(self, messages: Sequence[Message]) -> list[bytes]:
        return history_keys(messages, self.about)


class ServedPolicy:
    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, house: ServerDefaults, most_tokens: int):
        """`most_tokens`: of a prompt with its answer."""
        self.name, self.tokenizer, self.house, self.most_tokens = name, tokenizer, house, most_tokens
        self._stages: OrderedDict[str, ChatFormat] = OrderedDict()
        self.names = TokenNames(lambda token: self.text([token], special=True))
        # A text with more characters than this has more tokens than there is room for, without a look at it.
        self.most_characters = most_tokens * max(map(len, tokenizer.get_vocab()), default=1)

    def stage(self, tools: list[dict[str, Any]], settings: dict[str, Any]) -> ChatFormat:
        if not self.tokenizer.chat_template:
            raise InvalidRequest("the model has no chat template; ask /v1/completions", "messages")
        key = json.dumps([tools, settings], sort_keys=True)
        if key not in self._stages:
            self._stages[key] = ChatFormat(self.tokenizer, tools, settings, self.house.stops)
            if len(self._stages) > MOST_STAGES:
                self._stages.popitem(last=False)
        self._stages.move_to_end(key)
        return self._stages[key]

    def encode(self, text: str, param: str, *, special: bool = False) -> list[int]:
        """`special`: with what the tokenizer puts around every text."""
        if len(text) > self.most_characters:
            raise no_room(self.most_tokens, len(text), param)
        return self.tokenizer.encode(text, add_special_tokens=special, verbose=False)

    def conversation(self, messages: list[Message], stage: ChatFormat, record: SessionRecord | None) -> ChatPrompt:
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
                        return ChatPrompt(before.ids + tail, before, said, messages, stage)
        try:
            text = stage.renderer.render_prompt(messages, tools=stage.tools, where="messages")
        except UserError as error:
            raise InvalidRequest(str(error), "messages") from None
        return ChatPrompt(encoded(self.tokenizer, text), None, messages, messages, stage)

    def check_ids(self, ids: list[int], param: str) -> None:
        if min(ids) < 0 or max(ids) >= self.house.vocabulary:
            raise InvalidRequest(f"{param} has a token id that is not below {self.house.vocabulary}", param)

    def room(self, prompt_ids: list[int], param: str) -> int:
        """For the tokens of an answer."""
        if not prompt_ids:
            raise InvalidRequest(f"{param} has no token; at least one is needed", param)
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
