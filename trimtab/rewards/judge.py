"""Rewards from a judge (`--judge`): a model behind an OpenAI-compatible server that scores answers.

A question is the template with the sample's fields. The score is read from the reply by a pattern, and its range
becomes the rewards 0 to 1. A reply without a score in the range is asked for again, like a request that fails; at
temperature 0, which most likely gives the same reply, only once. Where all attempts fail, the sample has no reward and
its group is left out (`RewardResult.failed`).

Replies and failures are lines of a file. A run that was killed asks no question twice when it resumes, and leaves the
same groups out, so it goes on bit for bit. After an orderly end, as of a run whose judge was down, failed questions are
asked again.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import regex

from trimtab.config.inference_options import TOKEN_VARIABLE
from trimtab.config.objective_options import JudgeOptions
from trimtab.errors import UserError
from trimtab.files import writing
from trimtab.rewards.client import (
    HTTPReward,
    LastsLikely,
    ProtocolError,
    RewardEndpoint,
    RewardRefused,
    failure_text,
)
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult
from trimtab.rewards.verifiers import SEARCH_SECONDS
from trimtab.sandbox.process import Waiter

FIELDS = re.compile(r"\{(prompt|response|label|rubric)\}")
# Also "Score (0-10): 7" and "**Score** - 7"; the separator is as short as can be, so that a sign is the number's.
SCORE = r"(?i)score(?:[ *]*\([^)]*\))?\W{0,6}?([-+\u2212]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))"
ATTEMPTS_AT_START, SECONDS_AT_START = 3, 10.0
KEY_HINT = f"set the key as {TOKEN_VARIABLE}, or name its variable with --judge_key_variable"
TOKEN_LOGS = ("prompt_tokens", "completion_tokens")


class ReplyCache:
    """Replies by question, in memory and in a file. Entries are appended as lines by all processes of a run; a line
    that a killed process has torn is left out."""

    def __init__(self, file: Path | None):
        self.file, self._entries = file, dict[str, dict[str, Any]]()
        if file is None:
            return
        with writing(f"{file}: replies of the judge cannot be kept there"):
            content = file.read_bytes() if file.exists() else b""
        for line in content.split(b"\n"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if entry.get("ended"):
                    self._entries = {key: own for key, own in self._entries.items() if "failed" not in own}
                else:
                    self._entries[entry.pop("key")] = entry

    def get(self, key: str) -> dict[str, Any] | None:
        return self._entries.get(key)

    def put(self, key: str, entry: dict[str, Any]) -> None:
        self._append({"key": key, **entry})
        self._entries[key] = entry

    def end(self) -> None:
        """Failures that are in the file now are not remembered by the next run."""
        if any("failed" in entry for entry in self._entries.values()):
            self._append({"ended": True})

    def _append(self, entry: dict[str, Any]) -> None:
        if self.file is None:
            return
        lines = json.dumps(entry).encode() + b"\n"
        with writing(f"{self.file}: replies of the judge cannot be kept there"):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab+") as file:
                fcntl.lockf(file, fcntl.LOCK_EX)
                file.seek(0, os.SEEK_END)
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    lines = lines if file.read(1) == b"\n" else b"\n" + lines  # after a torn line
                else:  # a new file, or the old one went with the finished run of this folder: replies known from there
                    known = ({"key": key, **own} for key, own in self._entries.items())
                    lines = b"".join(json.dumps(own).encode() + b"\n" for own in known) + lines
                file.write(lines)


class JudgeReward(HTTPReward):
    name = "judge"

    def __init__(
        self,
        options: JudgeOptions,
        urls: Sequence[str],
        *,
        timeout: float = 180.0,
        pause: float = 2.5,
        cache: Path | None = None,
        waiter: Waiter | None = None,
    ):
        """Asks the server for its models first, so that a wrong address or key is known before the run. `cache`: file
        for replies; unset: they are kept in memory. `pause`: six attempts outlast a limit of requests a minute."""
        self.addresses = [RewardEndpoint(_base(url), flag="judge") for url in urls]
        self.question, self._rubric = options.judge_question, options.judge_criteria
        self._pattern, self._range = regex.compile(options.judge_pattern or SCORE), options.judge_range
        self._asked = dict[str, asyncio.Future[dict[str, Any]]]()
        super().__init__(
            token=os.environ.get(options.judge_key_variable or TOKEN_VARIABLE),
            timeout=timeout,
            attempts=1 + options.judge_retries,
            pause=pause,
            concurrency=options.judge_concurrency,
            tolerant=options.failed_reward_share > 0,
            waiter=waiter,
        )
        try:
            model = options.judge_model
            found: Future[str] = asyncio.run_coroutine_threadsafe(self._check(model), self._loop)
            self._body = {"model": self._waiter.results([found], str(self))[0], **options.judge_request}
            self.cache = ReplyCache(cache)
        except BaseException:
            super().close()
            raise

    def __str__(self) -> str:
        model = self._body["model"] if hasattr(self, "_body") else "a judge"
        return f"{model} at {', '.join(address.shown for address in self.addresses)}, as a judge"

    def __call__(self, request: RewardRequest) -> RewardResult:
        rows = [range(row, row + 1) for row in range(len(request))]
        return self._results(request, rows) if rows else RewardResult([])

    def close(self) -> None:
        if not self._loop.is_closed():
            super().close()
            self.cache.end()

    def fingerprint(self) -> bytes:
        """What the scores depend on, besides the options."""
        return f"{self.question}\0{self._rubric}".encode()

    # ---- questions and scores

    def text(self, request: RewardRequest, row: int) -> str:
        """The question about a sample. Fields are filled in at once: a response with `{label}` stays as it is."""
        label = request.truth(row)
        fields = {
            "prompt": _conversation(request.conversations[row]) if request.conversations else request.prompts[row],
            "response": request.responses[row],
            "label": label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=str),
            "rubric": self._rubric,
        }
        return FIELDS.sub(lambda found: fields[found.group(1)], self.question)

    def score(self, reply: str) -> float | None:
        """The reward of a reply, from 0 to 1; None: it has no score in the range."""
        reward, _ = self._read(reply)
        return reward

    def _read(self, reply: str) -> tuple[float | None, str]:
        """The reward of a reply or, if it has none, why."""
        low, high = self._range
        try:
            *_, found = [None, *list(self._pattern.finditer(reply, timeout=SEARCH_SECONDS))]
        except TimeoutError:
            return None, f"--judge_pattern takes more than {SEARCH_SECONDS:g} s"
        if found is None:
            return None, "nothing is like --judge_pattern"
        text = found.group(1 if self._pattern.groups else 0) or ""
        try:
            number = float(text.replace("\u2212", "-"))  # a minus sign that is no hyphen
        except ValueError:
            return None, f"{text[:40]!r} is no number: --judge_pattern needs a group (...) around it"
        if not low <= number <= high:
            return None, f"{number:g} is not in --judge_range"
        return (number - low) / (high - low), ""

    # ---- on the event loop

    async def _part(self, part: RewardRequest, rows: range, number: int) -> RewardResult:
        body = self._body | {"messages": [{"role": "user", "content": self.text(part, 0)}]}
        key = hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
        entry = self.cache.get(key)
        if entry is None or ("failed" not in entry and self.score(entry["text"]) is None):  # the pattern has changed
            entry = await self._once(key, body, rows, number)
        if "failed" in entry:
            raise RewardFailed(entry["failed"])
        reward, problem = self._read(entry["text"])
        if reward is None:  # it was read when it came, and took too long now
            raise RewardFailed(f"no score in a reply: {problem}")
        return RewardResult([reward], logs={name: [float(entry[name])] for name in (*TOKEN_LOGS, "seconds")})

    async def _once(self, key: str, body: dict[str, Any], rows: range, number: int) -> dict[str, Any]:
        """Ask, or wait for the reply to the same question, which equal answers have."""
        if key not in self._asked:
            self._asked[key] = asyncio.ensure_future(self._judged(key, body, rows, number))
            self._asked[key].add_done_callback(lambda _: self._asked.pop(key))
        return await asyncio.shield(self._asked[key])

    async def _judged(self, key: str, body: dict[str, Any], rows: range, number: int) -> dict[str, Any]:
        try:
            entry = await self._retried(lambda address: self._ask(address, body), rows, number)
        except RewardRefused as error:
            raise RewardRefused(f"{error}; {KEY_HINT}") from error
        except RewardFailed as error:
            if not self.tolerant:
                raise
            entry = {"failed": str(error)}
        self.cache.put(key, entry)
        return entry

    async def _ask(self, address: RewardEndpoint, body: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        reply = await self._json(f"{address.url}/chat/completions", body)
        try:
            text, usage = reply["choices"][0]["message"]["content"] or "", reply.get("usage") or {}
            tokens = {name: int(usage.get(name) or 0) for name in TOKEN_LOGS}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise RewardFailed(f"a reply that is no chat completion: {json.dumps(reply)[:120]}") from None
        reward, problem = self._read(str(text))
        if reward is None:
            low, high = self._range
            shown = repr(" ".join(str(text).split())[-120:])
            kind = LastsLikely if self._body.get("temperature") == 0 else RewardFailed
            raise kind(f"no score from {low:g} to {high:g} in the reply that ends {shown} ({problem})")
        text = str(text)
        return {"text": text, **tokens, "seconds": round(time.monotonic() - began, 3)}

    async def _check(self, model: str | None) -> str:
        """The model's name, from the first server's list if there is none."""
        address, listed, problem = self.addresses[0], None, ""
        for attempt in range(ATTEMPTS_AT_START):
            await asyncio.sleep(self._pause(attempt) if attempt else 0)
            try:
                async with asyncio.timeout(SECONDS_AT_START):
                    listed = (await self._json(f"{address.url}/models", None)).get("data")
                break
            except RewardRefused as error:
                raise UserError(f"--judge {address.shown}: {error}; {KEY_HINT}") from error
            except (ProtocolError, RewardFailed) as error:  # a server without this list
                problem = f" ({error})"
            except (httpx.HTTPError, TimeoutError) as error:
                if attempt == ATTEMPTS_AT_START - 1:
                    raise UserError(f"--judge {address.shown}: no answer ({failure_text(error)}); is it up?") from error
        if model is not None:
            return model
        if isinstance(listed, list) and listed and isinstance(listed[0], dict) and listed[0].get("id"):
            return str(listed[0]["id"])
        raise UserError(f"--judge {address.shown}: it lists no models{problem}; name one with --judge_model")


def _base(url: str) -> str:
    """The address up to /v1."""
    url = url.rstrip("/").removesuffix("/chat/completions")
    return url if "/" in url.partition("://")[2] else f"{url}/v1"


def _conversation(messages: Sequence[dict[str, Any]]) -> str:
    """Messages as the judge reads them; a single one is its text alone."""
    texts = [str(message.get("content") or "") for message in messages]
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"{message.get('role')}: {text}" for message, text in zip(messages, texts))
