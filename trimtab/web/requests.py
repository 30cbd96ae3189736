"""What every server does with a request before it reads what is asked: the right token, a whole body that is not too
large, JSON."""

import asyncio
import ipaddress
import json
import secrets
from typing import Any

from starlette.requests import Request

BODY_SECONDS = 120.0  # in which the whole of a request must have come
# Most clients read no answer before they have sent everything, and a connection that is closed meanwhile is an error to
# them that says nothing. So what is too large is read on, without being kept, up to here.
MOST_DISCARDED = 2**30


class Refused(Exception):
    """A request that is not answered, with the status and the words that say why."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def bearer_of(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def names_loopback(host: str) -> bool:
    """Whether a Host header, of any port, since tunnels have their own, names the loopback address. A site whose name
    was made to lead to this machine (DNS rebinding) sends another name."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower() == "localhost" or is_loopback(name)


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def authorise(request: Request, token: str | None) -> None:
    """`token`: what requests must bring; None: nothing, but they must call a loopback address by such a name."""
    if token is None:
        here, _ = request.scope.get("server") or ("", None)
        if is_loopback(here) and not names_loopback(request.headers.get("host", "")):
            raise Refused(421, "call this server by 127.0.0.1 or localhost, or start it with a --bearer_token")
    elif not secrets.compare_digest(bearer_of(request).encode(), token.encode()):
        raise Refused(401, "a bearer token is needed, and it must be the right one")


async def read_body(request: Request, max_bytes: int, advice: str) -> bytes:
    """`advice`: what to do where it is too large."""
    body, size = bytearray(), 0
    too_large = Refused(413, f"the request has more than {max_bytes} bytes; {advice}")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes and "expect" in request.headers:
        raise too_large  # a client that waits for leave to send its body hears at once
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size <= max_bytes:
                    body += piece
                elif size > MOST_DISCARDED:
                    break
    except TimeoutError:
        raise Refused(408, f"the request was not whole after {BODY_SECONDS:g} s") from None
    if size > max_bytes:
        raise too_large
    return bytes(body)


def json_object(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request is not JSON: {str(error)[:100]}") from None
    if not isinstance(body, dict):
        raise Refused(422, f"the request must be a JSON object, not {type(body).__name__}")
    return body
