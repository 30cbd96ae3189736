"""Rewards from servers (`--remote_rm_url`), and the two protocols of reward servers, for both sides.

OpenRLHF   POST {"query": [...], "prompts": [...], "labels": [...]}  ->  {"rewards": [...]}
PaddleNLP  POST {"src": [...], "tgt": [...], "response": [...]}      ->  {"error_code": 0, ..., "score": [...]}

A query is prompt and response together. OpenRLHF's reply may also have scores (for dynamic filtering) and extra_logs.

Several addresses share the samples. The client retries a request that fails (a slow or closed connection, a 5xx, broken
JSON, too few scores, NaN) at the next address, after a pause that doubles. When all attempts fail, the run stops.
"""

import asyncio
import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import httpx

from trimtab.config.inference_options import TOKEN_VARIABLE
from trimtab.config.resolved_config import without_credentials
from trimtab.errors import UserError, error_chain
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult, checked, finite_or_infinite, rows_text
from trimtab.sandbox.process import Waiter, duration


class RewardRefused(RewardFailed):
    """A server does not take our token: no other sample will fare better, so no sample is left out for it."""


class TryLater(RewardFailed):
    """A server says after how many seconds it will answer."""

    seconds = 0.0


class LastsLikely(RewardFailed):
    """A failure that another attempt most likely repeats: one is enough."""


class ProtocolError(Exception):
    """A body that is not of this protocol, and why."""


class OpenRLHF:
    name = "openrlhf"
    path = "/get_reward"
    mark = "query"
    """The field that distinguishes its requests."""

    def request_body(self, request: RewardRequest) -> dict[str, Any]:
        return {"query": request.queries, "prompts": request.prompts, "labels": request.labels}

    def read_request(self, body: dict[str, Any]) -> RewardRequest:
        queries = _texts(body, "query")
        prompts = _texts(body, "prompts", queries) if body.get("prompts") is not None else [""] * len(queries)
        labels = _list(body, "labels", queries) if body.get("labels") is not None else [None] * len(queries)
        # A client that sends something else as prompts still sends the whole text as the query.
        starts = [len(prompt) if query.startswith(prompt) else 0 for query, prompt in zip(queries, prompts)]
        return RewardRequest(queries, prompts, [query[start:] for query, start in zip(queries, starts)], labels)

    def reply_body(self, result: RewardResult) -> dict[str, Any]:
        # JSON has no NaN.
        logs = {name: values for name, values in result.logs.items() if all(map(math.isfinite, values))}
        return {"rewards": result.rewards, "scores": result.scores, "extra_logs": logs}

    def read_reply(self, body: dict[str, Any], count: int) -> RewardResult:
        if "rewards" not in body:
            raise ProtocolError(f"a reply with {', '.join(body) or 'nothing'} in place of rewards")
        return RewardResult(
            checked(body["rewards"], count, "reward"),
            checked(body["scores"], count, "score") if body.get("scores") is not None else [],
            dict(_readable_figures(body.get("extra_logs"), count)),
        )

    def error_body(self, status: int, message: str) -> dict[str, Any]:
        return {"error": message}


class PaddleNLP:
    name = "paddlenlp"
    path = "/"
    mark = "src"

    def request_body(self, request: RewardRequest) -> dict[str, Any]:
        return {
            "src": request.prompts,
            "tgt": [_as_text(label) for label in request.labels],
            "response": request.responses,
        }

    def read_request(self, body: dict[str, Any]) -> RewardRequest:
        prompts = _texts(body, "src")
        labels, responses = _texts(body, "tgt", prompts), _texts(body, "response", prompts)
        return RewardRequest([a + b for a, b in zip(prompts, responses)], prompts, responses, labels)

    def reply_body(self, result: RewardResult) -> dict[str, Any]:
        return {"error_code": 0, "error_msg": "Success", "score": result.rewards}

    def read_reply(self, body: dict[str, Any], count: int) -> RewardResult:
        if body.get("error_code", 0) != 0:
            raise RewardFailed(f"error {body['error_code']}: {body.get('error_msg', '')}")
        if "score" not in body:
            raise ProtocolError(f"a reply with {', '.join(body) or 'nothing'} in place of score")
        return RewardResult(checked(body["score"], count, "score"))

    def error_body(self, status: int, message: str) -> dict[str, Any]:
        return {"error_code": status, "error_msg": message, "score": []}


Protocol = OpenRLHF | PaddleNLP
PROTOCOLS: dict[str, Protocol] = {protocol.name: protocol for protocol in (OpenRLHF(), PaddleNLP())}


def protocol_of(body: dict[str, Any]) -> Protocol:
    """The protocol of a request, by its fields."""
    for protocol in PROTOCOLS.values():
        if protocol.mark in body:
            return protocol
    raise ProtocolError(f"a request has a field {' or '.join(protocol.mark for protocol in PROTOCOLS.values())}")


def encode(body: dict[str, Any]) -> bytes:
    """JSON as the Python standard library and the package requests write it."""
    return json.dumps(body, default=_of_another_library).encode()


def _readable_figures(logs: Any, count: int) -> Iterator[tuple[str, list[float]]]:
    """Figures to be logged, a single one for every sample; no run stops for one that cannot be read."""
    for name, values in logs.items() if isinstance(logs, dict) else ():
        values = values if isinstance(values, list) else [values] * count
        if len(values) == count and all(isinstance(value, int | float) for value in values):
            yield name, [finite_or_infinite(value) for value in values]


def _list(body: dict[str, Any], field: str, like: list[str] | None = None) -> list[Any]:
    values = body.get(field)
    if not isinstance(values, list):
        raise ProtocolError(f"{field} must be a list, not {type(values).__name__}")
    if like is not None and len(values) != len(like):
        raise ProtocolError(f"{field} has {len(values)} entries for {len(like)} samples")
    return values


def _texts(body: dict[str, Any], field: str, like: list[str] | None = None) -> list[str]:
    values = _list(body, field, like)
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise ProtocolError(f"{field} of row {row} must be text, not {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ProtocolError(f"{field} of row {row} has half a surrogate pair, which is no character") from None
    return values


def _as_text(label: Any) -> str:
    if label is None:
        return ""
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=_of_another_library)


def _of_another_library(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


# ---- the client


WORTH_ANOTHER_TRY = {408, 425, 429}  # of the client errors; server errors all are
LONGEST_PAUSE = 30.0
IN_A_ROW = 4  # failed parts for each request at once, after which servers are asked once, without pauses
Reply = TypeVar("Reply")
SECONDS_TO_CLOSE = 5.0


class RewardEndpoint:
    """A server, and its protocol once that is known."""

    def __init__(self, url: str, protocol: str | None = None, flag: str = "remote_rm_url"):
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            such = "http://localhost:8000/v1" if flag == "judge" else "http://localhost:5000/get_reward"
            raise UserError(f"--{flag} {without_credentials(url)}: give an address such as {such}")
        self.url, self.shown = url, without_credentials(url)
        self.first = "paddlenlp" if parsed.path in ("", "/") else "openrlhf"
        self.protocol = PROTOCOLS[protocol] if protocol else None

    def candidates(self) -> list[Protocol]:
        """The protocol, or all of them, first the one whose servers have such addresses."""
        if self.protocol is not None:
            return [self.protocol]
        return sorted(PROTOCOLS.values(), key=lambda protocol: protocol.name != self.first)


class HTTPReward:
    """A reward from servers: requests with timeouts and retries, a limited number at once."""

    name = "remote"
    concurrent = True
    addresses: Sequence["RewardEndpoint"]

    def __init__(
        self,
        *,
        token: str | None,
        timeout: float = 180.0,
        attempts: int = 6,
        pause: float = 1.0,
        concurrency: int = 8,
        tolerant: bool = False,
        waiter: Waiter | None = None,
    ):
        """`token`: sent as bearer token. `timeout`: seconds in which the whole reply must be there; `attempts`: how
        often a part is asked for; `pause`: seconds before the second attempt. `tolerant`: samples whose requests all
        fail are in the result's `failed`; otherwise the run stops."""
        self.timeout, self.attempts, self.pause, self.tolerant = timeout, attempts, pause, tolerant
        self.slowest = 0.0  # seconds of a request that was answered
        self._failures = 0  # parts in a row that got no reward
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        # A proxy named by the environment is not for servers on this machine.
        certificates = httpx.create_ssl_context()
        here = httpx.AsyncHTTPTransport(verify=certificates)
        direct = {f"all://{host}": here for host in ("localhost", "127.0.0.1", "[::1]")}
        # httpx's own limits are on each read: a reply that drips in would never meet them.
        self._client = httpx.AsyncClient(headers=headers, timeout=None, verify=certificates, mounts=direct)
        self._waiter = waiter or Waiter()
        self._concurrency, self._turns = concurrency, asyncio.Semaphore(concurrency)
        # An event loop in a thread: a request there can be cancelled at any moment, whatever it waits for.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote-reward", daemon=True)
        self._thread.start()

    def _results(self, request: RewardRequest, parts: Sequence[range]) -> RewardResult:
        """The results of consecutive parts of a request."""
        asked = [
            asyncio.run_coroutine_threadsafe(self._tolerated(request.take(rows), rows, number), self._loop)
            for number, rows in enumerate(parts)
        ]
        longest = self._longest() * math.ceil(len(parts) / self._concurrency)
        report = f"{self} for {len(request)} samples; given up after {duration(longest)} at the latest"
        return RewardResult.joined(self._waiter.results(asked, report))

    async def _tolerated(self, part: RewardRequest, rows: range, number: int) -> RewardResult:
        try:
            return await self._part(part, rows, number)
        except RewardRefused as error:
            raise RewardFailed(str(error)) from error
        except RewardFailed as error:
            if not self.tolerant:
                raise
            return RewardResult.of_failed(len(part), str(error))

    async def _part(self, part: RewardRequest, rows: range, number: int) -> RewardResult:
        raise NotImplementedError

    async def _retried(
        self, ask: Callable[[RewardEndpoint], Coroutine[Any, Any, Reply]], rows: Sequence[int], number: int
    ) -> Reply:
        """The reply of one address or, where that fails, of the next."""
        failures: list[str] = []
        lasting, ready = 0, dict[RewardEndpoint, float]()  # when a server that said so will answer
        kind: type[RewardFailed] = RewardFailed
        async with self._turns:
            for attempt in range(1 if self._failures >= IN_A_ROW * self._concurrency else self.attempts):
                address = self.addresses[(number + attempt) % len(self.addresses)]
                if attempt:
                    await asyncio.sleep(max(self._pause(attempt), ready.get(address, 0.0) - self._loop.time()))
                began = self._loop.time()
                try:
                    async with asyncio.timeout(self.timeout):
                        reply = await ask(address)
                    self.slowest, self._failures = max(self.slowest, self._loop.time() - began), 0
                    return reply
                except TimeoutError:
                    failures.append(f"{address.shown}: timed out, no whole reply in {self.timeout:g} s")
                except (httpx.HTTPError, RewardFailed, ProtocolError) as error:
                    failures.append(f"{address.shown}: {failure_text(error)}")
                    lasting += isinstance(error, LastsLikely)
                    if isinstance(error, TryLater):  # no attempt takes longer than its timeout with this pause
                        ready[address] = min(self._loop.time() + error.seconds, began + self.timeout)
                    kind = RewardRefused if isinstance(error, RewardRefused) else RewardFailed
                    if lasting > 1 or (isinstance(error, ProtocolError | RewardRefused) and len(self.addresses) == 1):
                        break
        self._failures += 1
        tried = f"{len(failures)} attempt{'s' * (len(failures) > 1)}"
        raise kind(f"no reward for {rows_text(rows)} after {tried}; the last: {failures[-1]}")

    async def _json(self, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The JSON object that an address answers; `body` None: to GET. A ProtocolError is not worth another try."""
        content = None if body is None else encode(body)
        response = await self._client.request("GET" if body is None else "POST", url, content=content)
        status, content = response.status_code, response.content
        shown = repr(" ".join(content.decode(errors="replace").split())[:120])
        if status >= 500 or status in WORTH_ANOTHER_TRY:
            later = TryLater(f"HTTP status {status} {shown}")
            with contextlib.suppress(ValueError):  # it may be a date
                later.seconds = float(response.headers.get("Retry-After", 0))
            raise later
        if status in (401, 403):
            raise RewardRefused(f"HTTP status {status} {shown}")
        if status != 200:
            raise ProtocolError(f"HTTP status {status} {shown}")
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):  # the latter: lists in lists in lists
            raise RewardFailed(f"a reply that is not JSON, or not JSON of rewards: {shown}") from None
        if not isinstance(reply, dict):
            raise ProtocolError(f"a reply that is no JSON object: {shown}")
        return reply

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):  # a server that does not close its side is not waited for
            asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result(SECONDS_TO_CLOSE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    def _longest(self) -> float:
        """Seconds after which a part is given up."""
        return self.attempts * self.timeout + sum(map(self._pause, range(1, self.attempts)))

    def _pause(self, attempt: int) -> float:
        return min(self.pause * 2 ** (attempt - 1), LONGEST_PAUSE)


class RemoteReward(HTTPReward):
    def __init__(
        self,
        urls: Sequence[str],
        *,
        protocol: str | None = None,
        token: str | None = None,
        batch_size: int | None = None,
        **how: Any,
    ):
        """`protocol`: openrlhf or paddlenlp; unset: found out with the first samples. `token`: unset: what
        TRIMTAB_BEARER_TOKEN holds. `batch_size`: samples in one request; unset: the samples divided by the addresses.
        `how`: see HTTPReward."""
        if protocol is not None and protocol not in PROTOCOLS:
            raise UserError(f"reward protocol {protocol}: it must be one of {', '.join(PROTOCOLS)}")
        self.addresses, self.batch_size = [RewardEndpoint(url, protocol) for url in urls], batch_size
        super().__init__(token=token or os.environ.get(TOKEN_VARIABLE), **how)

    def __str__(self) -> str:
        return f"what {', '.join(address.shown for address in self.addresses)} answers"

    def __call__(self, request: RewardRequest) -> RewardResult:
        if not len(request):
            return RewardResult([])
        size = self.batch_size or math.ceil(len(request) / len(self.addresses))
        return self._results(request, [range(i, min(i + size, len(request))) for i in range(0, len(request), size)])

    async def _part(self, part: RewardRequest, rows: range, number: int) -> RewardResult:
        return await self._retried(lambda address: self._ask(address, part), rows, number)

    async def _ask(self, address: RewardEndpoint, part: RewardRequest) -> RewardResult:
        """The reply of an address, in its protocol or, while that is not known, in any."""
        failure: Exception | None = None
        for protocol in address.candidates():
            try:
                result = await self._exchange(address.url, protocol, part)
            except (ProtocolError, RewardFailed) as error:
                # A failure of the server says more than that the other protocol is not understood.
                failure = error if failure is None or isinstance(failure, ProtocolError) else failure
                continue
            address.protocol = protocol
            return result
        assert failure is not None, "an address has at least one protocol"
        raise failure

    async def _exchange(self, url: str, protocol: Protocol, part: RewardRequest) -> RewardResult:
        reply = await self._json(url, protocol.request_body(part))
        return protocol.read_reply(reply, len(part))


def failure_text(error: Exception) -> str:
    """The error in words: httpx names some failures by their class alone, and the system's message is in the chain."""
    message = str(error) or type(error).__name__
    codes = (link.errno for link in error_chain(error) if link is not error and isinstance(link, OSError))
    code = next(filter(None, codes), None)
    return message if code is None else f"{message} ({os.strerror(code)})"
