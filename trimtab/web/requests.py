"""What every server does with a request before it reads what is asked: the right token, a whole body that is not too
large, JSON."""

import asyncio
import json
import secrets
from typing import Any

from starlette.requests import Request

BODY_SECONDS = 120.0  # in which the whole of a request must have come


class Refused(Exception):
    """A request that is not answered, with the status and the words that say why."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def bearer_of(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def authorise(request: Request, token: str | None) -> None:
    if token is not None and not secrets.compare_digest(bearer_of(request).encode(), token.encode()):
        raise Refused(401, "a bearer token is needed, and it must be the right one")


async def read_body(request: Request, max_bytes: int, advice: str) -> bytes:
    """`advice`: what to do where it is too large."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise Refused(413, f"the request has more than {max_bytes} bytes; {advice}")
    except TimeoutError:
        raise Refused(408, f"the request was not whole after {BODY_SECONDS:g} s") from None
    return bytes(body)


def json_object(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request is not JSON: {str(error)[:100]}") from None
    if not isinstance(body, dict):
        raise Refused(422, f"the request must be a JSON object, not {type(body).__name__}")
    return body
