"""Sessions with the exact tokens of each conversation, and the served policy: its chat format, tokens and limits.

A chat client sends the whole conversation again at every turn. If the request names a session, the prompt of the next
turn is the exact tokens of the previous turn with the new messages appended, so sampled tokens are never tokenized
again. A recorded turn points to the turn that it continues and stores only its own tokens; turns that no other
continues are the ends of branches.
"""

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

from trimtab.data.chat_template import ChatRenderer
from trimtab.data.tokenizer import decodes_fast, encode_text, texts_of
from trimtab.envs.chat_tokens import ChatAppender, MessageParser
from trimtab.envs.types import Message
from trimtab.errors import UserError
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.rollout.trajectory import Finish, Trajectory
from trimtab.server.request_params import InvalidRequest, ServerDefaults, no_room

MOST_TOKENS = 2**24  # of all sessions; each takes twelve bytes
TURN = 128  # memory of a turn besides its tokens, in tokens
MOST_CHAT_FORMATS = 64  # cached


def stream_seed(seed: int, session: str | None, length: int) -> int:
    """The seed of a turn after `length` tokens, as int64. Clients send one seed for all conversations and turns, so the
    turn's position is included; equal requests still have equal answers."""
    name = f"{seed}/{'' if session is None else session}/{length}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


# ---- records


@dataclass(eq=False)
class RecordedTurn:
    """One sampled turn of a session."""

    number: int
    before: "RecordedTurn | None"  # the turn that it continues
    read: np.ndarray  # int32: prompt tokens since the turn before, or since the beginning
    rollout: Trajectory
    ended: bool  # its last token is a stop token
    message: Message
    new_messages: list[Message] = field(default_factory=list)  # the messages of `read`, for chat clients

    @property
    def ids(self) -> list[int]:
        """All tokens up to its end."""
        parts: list[np.ndarray] = []
        turn: RecordedTurn | None = self
        while turn is not None:
            parts += [turn.rollout.tokens, turn.read]
            turn = turn.before
        return np.concatenate(parts[::-1]).tolist()

    @cached_property
    def length(self) -> int:
        """Number of all tokens up to its end."""
        before = 0 if self.before is None else self.before.length
        return before + len(self.read) + len(self.rollout.tokens)

    @cached_property
    def digest(self) -> "hashlib.blake2b":
        """Hash of all tokens up to its end, to find the turn that a prompt continues."""
        found = _digest() if self.before is None else self.before.digest.copy()
        found.update(self.read.tobytes())
        found.update(self.rollout.tokens.tobytes())
        return found

    @property
    def held(self) -> int:
        """Its memory, in tokens."""
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
        return {
            "turn": self.number,
            "after": None if self.before is None else self.before.number,
            "read_token_ids": self.read.tolist(),
            "token_ids": self.rollout.tokens.tolist(),
            "logprobs": self.rollout.log_probs.tolist(),
            "versions": self.rollout.versions.tolist(),
            "finish_reason": self.rollout.finish,
            "message": self.message,
        }


class SessionRecord:
    """The turns of one session."""

    def __init__(
        self, seed: int | None = None, most_turns: int | None = None, pinned: SamplingParams | None = None
    ) -> None:
        """`seed`: of its turns, overriding requests; `most_turns`: more are refused; `pinned`: sampling of all its
        turns."""
        self.seed, self.most_turns, self.pinned = seed, most_turns, pinned
        self.refused: Finish | None = None  # why the last request was refused, if it was
        self._requests: Counter[int] = Counter()  # number of requests, by the length of the prompt
        self.turns: list[RecordedTurn] = []
        self.held = 0  # memory of all turns, in tokens
        self._by_history: dict[bytes, RecordedTurn] = {}
        self._by_tokens: dict[int, dict[bytes, RecordedTurn]] = {}  # by length, then by digest

    def next_seed(self, length: int) -> int | None:
        """The seed of a turn after `length` tokens: it depends on the position only, and differs for repeated
        requests."""
        if self.seed is None:
            return None
        self._requests[length] += 1
        return request_seed(stream_seed(self.seed, None, length), self._requests[length] - 1)

    def turn_before_messages(self, keys: Sequence[bytes]) -> tuple[int, RecordedTurn] | None:
        """The latest recorded turn of a conversation with these history keys, and the number of messages up to its
        end."""
        for count in range(len(keys) - 1, 0, -1):
            if (turn := self._by_history.get(keys[count])) is not None:
                return count, turn
        return None

    def turn_before_ids(self, prompt_ids: list[int]) -> RecordedTurn | None:
        """The longest recorded turn whose tokens are a prefix of the prompt."""
        ids, best, digest, read = np.array(prompt_ids, dtype=np.int32), None, _digest(), 0
        for length in sorted(length for length in self._by_tokens if length <= len(ids)):
            digest.update(ids[read:length].tobytes())
            read = length
            best = self._by_tokens[length].get(digest.digest(), best)
        return best

    def add(
        self,
        rollout: Trajectory,
        before: RecordedTurn | None,
        message: Message,
        *,
        ended: bool,
        new_messages: list[Message] | None = None,
        key: bytes | None = None,
    ) -> RecordedTurn:
        """`key`: of the history that ends with this turn."""
        known = 0 if before is None else before.length
        read = np.array(rollout.prompt_ids[known:], dtype=np.int32)
        kept = replace(rollout, prompt_ids=[], alternatives=None)  # the record has the earlier tokens already
        turn = RecordedTurn(len(self.turns), before, read, kept, ended, message, new_messages or [])
        self.turns.append(turn)
        self._by_tokens.setdefault(turn.length, {}).setdefault(turn.digest.digest(), turn)
        self.held += turn.held
        if key is not None:
            self._by_history[key] = turn
        return turn

    def trace(self) -> dict[str, Any]:
        branches = [[turn.number for turn in end.path] for end in branch_ends(self.turns)]
        return {"turns": [turn.trace() for turn in self.turns], "branches": branches}


def branch_ends(turns: Sequence[RecordedTurn]) -> list[RecordedTurn]:
    """The last turns of all branches, in the order in which they were sampled."""
    continued = {id(turn.before) for turn in turns}
    return [turn for turn in turns if id(turn) not in continued]


def _digest() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16)


class SessionStore:
    """The records of all sessions, by name. Above the memory limit, the least recently used are evicted."""

    def __init__(self, max_tokens: int = MOST_TOKENS, *, invited: bool = False, private: bool = False):
        """`invited`: every request must name a session that this process opened; `private`: only names from `issue` are
        accepted."""
        self.max_tokens, self.held, self.invited, self.private = max_tokens, 0, invited, private
        self._records: OrderedDict[str, SessionRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def find(self, session: str) -> SessionRecord | None:
        return self._records.get(session)

    def get_or_create(self, session: str | None) -> SessionRecord | None:
        """A session's record; None without a session."""
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
        """Open a session under a name that cannot be guessed."""
        name, record = secrets.token_urlsafe(24), SessionRecord()
        record.held = TURN  # so that sessions without turns are limited, too
        self.open(name, record)
        self.held += record.held
        self._evict()
        return name

    def drop(self, session: str) -> None:
        if (record := self._records.pop(session, None)) is not None:
            self.held -= record.held

    def grown(self, session: str, turn: RecordedTurn) -> None:
        """A turn was added to this session's record, which may have been dropped meanwhile."""
        record = self._records.get(session)
        if record is None or turn.number >= len(record.turns) or record.turns[turn.number] is not turn:
            return
        self.held += turn.held
        self._evict()

    def _evict(self) -> None:
        while self.held > self.max_tokens and not self.invited:
            self.drop(next(iter(self._records)))


# ---- the served policy


class TokenNames(dict[int, tuple[str, str]]):
    """The text of each token in responses, and the same as JSON, decoded on first use."""

    def __init__(self, name: Callable[[int], str]):
        super().__init__()
        self._name = name

    def __missing__(self, token: int) -> tuple[str, str]:
        name = self._name(token)
        found = self[token] = name, json.dumps(name)
        return found


class ChatFormat:
    """Converts conversations with the same tools and template settings to tokens, and answers to messages."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: list[dict[str, Any]],
        settings: dict[str, Any],
        stops: Sequence[int],
    ):
        self._about = [tools, settings]
        self.tools = tools or None
        self.parsing = MessageParser(tokenizer, tools)
        self.renderer = ChatRenderer(tokenizer, settings=settings)
        self.appending: ChatAppender | None
        try:
            self.appending = ChatAppender(tokenizer, tools, stops, settings)
        except UserError as error:
            self.appending, self.why_not = None, str(error)

    def history_keys(self, messages: Sequence[Message]) -> list[bytes]:
        """A key for each prefix of a conversation, from roles, contents, tools and settings. Ids of calls, reasoning
        and surrounding white space are ignored, because clients change them."""
        key = hashlib.blake2b(_canonical(self._about), digest_size=16)
        keys = [key.digest()]
        for message in messages:
            calls = [call["function"] for call in message.get("tool_calls", ())]
            own = [message["role"], (message.get("content") or "").strip(), calls]
            if message["role"] != "assistant":
                own.append(message.get("name"))
            key.update(_canonical(own))
            keys.append(key.digest())
        return keys


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode() + b"\n"


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt made from messages."""

    ids: list[int]
    before: RecordedTurn | None  # the turn that it continues, token by token
    new_messages: list[Message]  # since then
    messages: list[Message]
    format: ChatFormat


class ServedPolicy:
    """The served model as requests see it: name, tokenizer, context length and chat formats."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, defaults: ServerDefaults, max_model_len: int):
        """`max_model_len`: of a prompt with its answer."""
        self.name, self.tokenizer, self.defaults, self.max_model_len = name, tokenizer, defaults, max_model_len
        self._chat_formats: OrderedDict[str, ChatFormat] = OrderedDict()
        self.names = TokenNames(lambda token: self.text([token], special=True))
        # A text with more characters has more tokens than the context, and is refused without tokenizing it.
        self.most_characters = max_model_len * max(map(len, tokenizer.get_vocab()), default=1)

    def chat_format(self, tools: list[dict[str, Any]], settings: dict[str, Any]) -> ChatFormat:
        if not self.tokenizer.chat_template:
            raise InvalidRequest("the model has no chat template; ask /v1/completions", "messages")
        key = json.dumps([tools, settings], sort_keys=True)
        if key not in self._chat_formats:
            self._chat_formats[key] = ChatFormat(self.tokenizer, tools, settings, self.defaults.stops)
            if len(self._chat_formats) > MOST_CHAT_FORMATS:
                self._chat_formats.popitem(last=False)
        self._chat_formats.move_to_end(key)
        return self._chat_formats[key]

    def encode(self, text: str, param: str, *, special: bool = False) -> list[int]:
        """`special`: with the special tokens that the tokenizer adds to every text."""
        if len(text) > self.most_characters:
            raise no_room(self.max_model_len, len(text), param)
        return self.tokenizer.encode(text, add_special_tokens=special, verbose=False)

    def chat_prompt(self, messages: list[Message], chat_format: ChatFormat, record: SessionRecord | None) -> ChatPrompt:
        """The tokens of a conversation. Recorded turns are included as sampled, with the later messages appended."""
        if sum(len(message["content"]) for message in messages) > self.most_characters:
            raise no_room(self.max_model_len, self.most_characters, "messages")
        if record is not None and chat_format.appending is not None:
            found = record.turn_before_messages(chat_format.history_keys(messages))
            if found is not None:
                count, before = found
                new = messages[count:]
                if new and all(message["role"] in ("user", "tool") for message in new):
                    try:
                        tail = chat_format.appending.after(new, before.ended)
                    except UserError:
                        pass  # rendering the whole conversation may work, or give a clearer error
                    else:
                        return ChatPrompt(before.ids + tail, before, new, messages, chat_format)
        try:
            text = chat_format.renderer.render_prompt(messages, tools=chat_format.tools, where="messages")
        except UserError as error:
            raise InvalidRequest(str(error), "messages") from None
        return ChatPrompt(encode_text(self.tokenizer, text), None, messages, messages, chat_format)

    def check_ids(self, ids: list[int], param: str) -> None:
        if min(ids) < 0 or max(ids) >= self.defaults.vocabulary:
            raise InvalidRequest(f"{param} has a token id that is not below {self.defaults.vocabulary}", param)

    def max_new_tokens(self, prompt_ids: list[int], param: str, least: int = 1) -> int:
        """The largest number of tokens of an answer to this prompt, which must be at least `least`."""
        if not prompt_ids:
            raise InvalidRequest(f"{param} has no token; at least one is needed", param)
        self.check_ids(prompt_ids, param)
        room = self.max_model_len - len(prompt_ids)
        if room < least:
            raise no_room(self.max_model_len, len(prompt_ids), param)
        return room

    def ended(self, rollout: Trajectory) -> bool:
        """Whether its last token is a stop token."""
        return bool(rollout.ids) and rollout.ids[-1] in self.defaults.stops

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """`special`: with the names of special tokens."""
        if special or self.tokenizer.clean_up_tokenization_spaces:
            return self.tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return texts_of(self.tokenizer, [list(ids)])[0]

    def name_all(self) -> None:
        """Decode every token once, before requests. Slow tokenizers take long and may reject ids beyond their
        vocabulary, so they decode on first use."""
        self.text([0])
        if decodes_fast(self.tokenizer):
            alone = [[token] for token in range(self.defaults.vocabulary)]
            names = self.tokenizer.backend_tokenizer.decode_batch(alone, skip_special_tokens=False)
            self.names.update(enumerate(zip(names, map(json.dumps, names))))
