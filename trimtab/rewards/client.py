"""Rewards from servers (`--remote_rm_url`), in either protocol of protocols.py. Several addresses share the samples.

What does not come back whole (a slow or closed connection, a 5xx, broken JSON, too few scores, NaN) is asked for again,
after a pause that doubles, at the next address. A reward that cannot be had stops the run; none is invented.
"""

import asyncio
import contextlib
import json
import math
import os
import threading
from collections.abc import Sequence

import httpx

from trimtab.config.credentials import without_credentials
from trimtab.config.serving import TOKEN_VARIABLE
from trimtab.errors import UserError, error_chain
from trimtab.processes.waiting import Waiting, spoken
from trimtab.rewards.protocols import PROTOCOLS, NotUnderstood, Protocol, encode
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult, named

WORTH_ANOTHER_TRY = {408, 425, 429}  # of the client errors; server errors all are
LONGEST_PAUSE = 30.0
LONGEST_REPLY = 2**28
SECONDS_TO_CLOSE = 5.0


class Address:
    """A server, and the protocol it was found to speak."""

    def __init__(self, url: str, protocol: str | None):
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UserError(
                f"--remote_rm_url {without_credentials(url)}: give an address such as http://localhost:5000/get_reward"
            )
        self.url, self.shown = url, without_credentials(url)
        self.first = "paddlenlp" if parsed.path in ("", "/") else "openrlhf"
        self.spoken = PROTOCOLS[protocol] if protocol else None

    def candidates(self) -> list[Protocol]:
        """The protocol, or all of them, beginning with the one whose servers have such addresses."""
        if self.spoken is not None:
            return [self.spoken]
        return sorted(PROTOCOLS.values(), key=lambda protocol: protocol.name != self.first)


class HttpReward:
    name = "remote"
    concurrent = True

    def __init__(
        self,
        urls: Sequence[str],
        *,
        protocol: str | None = None,
        token: str | None = None,
        timeout: float = 180.0,
        attempts: int = 6,
        pause: float = 1.0,
        batch_size: int | None = None,
        concurrency: int = 8,
        waiting: Waiting | None = None,
    ):
        """`protocol`: openrlhf or paddlenlp; unset: found out with the first samples. `token`: sent as bearer token;
        unset: what TRIMTAB_BEARER_TOKEN holds.

        `timeout`: seconds in which the whole reply must be there; `attempts`: how often a part is asked for; `pause`:
        seconds before the second attempt. `batch_size`: samples in one request; unset: the samples divided by the
        addresses.
        """
        if protocol is not None and protocol not in PROTOCOLS:
            raise UserError(f"reward protocol {protocol}: it must be one of {', '.join(PROTOCOLS)}")
        self.addresses = [Address(url, protocol) for url in urls]
        self.timeout, self.attempts, self.pause, self.batch_size = timeout, attempts, pause, batch_size
        token = token or os.environ.get(TOKEN_VARIABLE)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        # A proxy that the environment names is for the world outside, not for a server on this machine.
        certificates = httpx.create_ssl_context()
        here = httpx.AsyncHTTPTransport(verify=certificates)
        direct = {f"all://{host}": here for host in ("localhost", "127.0.0.1", "[::1]")}
        # httpx's own limits are on each read: a reply that drips in would never meet them.
        self._client = httpx.AsyncClient(headers=headers, timeout=None, verify=certificates, mounts=direct)
        self._waiting = waiting or Waiting()
        self._concurrency, self._turns = concurrency, asyncio.Semaphore(concurrency)
        # A loop in a thread of its own: a request in it can be ended at any moment, whatever it waits for.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote-reward", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return f"what {', '.join(address.shown for address in self.addresses)} answers"

    def __call__(self, request: RewardRequest) -> RewardResult:
        if not len(request):
            return RewardResult([])
        size = self.batch_size or math.ceil(len(request) / len(self.addresses))
        parts = [range(first, min(first + size, len(request))) for first in range(0, len(request), size)]
        asked = [
            asyncio.run_coroutine_threadsafe(self._part(request, rows, number), self._loop)
            for number, rows in enumerate(parts)
        ]
        longest = self._longest() * math.ceil(len(parts) / self._concurrency)
        told = f"{self} for {len(request)} samples; given up after {spoken(longest)} at the latest"
        return RewardResult.joined(self._waiting.results(asked, told))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):  # a farewell that is not returned is not waited for
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

    async def _part(self, request: RewardRequest, rows: range, number: int) -> RewardResult:
        """The rewards of these rows, from the address whose turn it is or, where that fails, from the next."""
        part, failures = request.take(rows), []
        async with self._turns:
            for attempt in range(self.attempts):
                if attempt:
                    await asyncio.sleep(self._pause(attempt))
                address = self.addresses[(number + attempt) % len(self.addresses)]
                try:
                    async with asyncio.timeout(self.timeout):
                        return await self._ask(address, part)
                except TimeoutError:
                    failures.append(f"{address.shown}: timed out, no whole reply in {self.timeout:g} s")
                except (httpx.HTTPError, RewardFailed, NotUnderstood) as error:
                    failures.append(f"{address.shown}: {_reason(error)}")
                    if isinstance(error, NotUnderstood) and len(self.addresses) == 1:
                        break
        raise RewardFailed(f"no reward for {named(rows)} after {len(failures)} attempts; the last: {failures[-1]}")

    async def _ask(self, address: Address, part: RewardRequest) -> RewardResult:
        """The address's answer, in its protocol or, as long as that is not known, in any."""
        failure: Exception | None = None
        for protocol in address.candidates():
            try:
                result = await self._exchange(address.url, protocol, part)
            except (NotUnderstood, RewardFailed) as error:
                # A failure may pass, so it says more than that the other protocol is not understood.
                failure = error if failure is None or isinstance(failure, NotUnderstood) else failure
                continue
            address.spoken = protocol
            return result
        assert failure is not None, "an address has at least one protocol"
        raise failure

    async def _exchange(self, url: str, protocol: Protocol, part: RewardRequest) -> RewardResult:
        status, content = await self._post(url, encode(protocol.request_body(part)))
        shown = repr(" ".join(content.decode(errors="replace").split())[:120])
        if status >= 500 or status in WORTH_ANOTHER_TRY:
            raise RewardFailed(f"HTTP status {status} {shown}")
        if status != 200:
            raise NotUnderstood(f"HTTP status {status} {shown}")
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):  # the latter: lists in lists in lists
            raise RewardFailed(f"a reply that is not JSON, or not JSON of rewards: {shown}") from None
        if not isinstance(reply, dict):
            raise NotUnderstood(f"a reply that is no JSON object: {shown}")
        return protocol.read_reply(reply, len(part))

    async def _post(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Status and content."""
        content = bytearray()
        async with self._client.stream("POST", url, content=body) as response:
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > LONGEST_REPLY:
                    raise RewardFailed(f"a reply of more than {LONGEST_REPLY} bytes")
            return response.status_code, bytes(content)


def _reason(error: Exception) -> str:
    """httpx names some failures by their class alone, and keeps what the system said behind its own words."""
    told = str(error) or type(error).__name__
    codes = (link.errno for link in error_chain(error) if link is not error and isinstance(link, OSError))
    code = next(filter(None, codes), None)
    return told if code is None else f"{told} ({os.strerror(code)})"
