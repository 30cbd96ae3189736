"""What a request gets that is not answered, in the form that clients of this protocol read."""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from trimtab.errors import UserError
from trimtab.serving.desk import EngineFailed, Overloaded
from trimtab.web.manners import Closing
from trimtab.web.requests import Refused

log = logging.getLogger(__name__)

TYPES: Mapping[int, str] = {401: "authentication_error", 404: "not_found_error", 500: "server_error"}
LATER = {"Retry-After": "1"}


class NotUnderstood(Refused):
    """`param`: the field that is wrong; `code`: a word that clients look for."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(status, message)
        self.param, self.code = param, code


def no_room(most: int, found: int, param: str) -> NotUnderstood:
    # The first words and the code are what clients look for.
    words = f"This model's maximum context length is {most} tokens, and the prompt has {found}: shorten it"
    return NotUnderstood(words, param, "context_length_exceeded")


def refusal(error: Exception) -> JSONResponse:
    match error:
        case NotUnderstood():
            return reply(error.status, str(error), param=error.param, code=error.code)
        case Refused():
            # What is still being sent would be read as the next request.
            headers = {"Connection": "close"} if error.status in (408, 413) else {}
            # Clients of this protocol know 400 where others say 422.
            return reply(400 if error.status == 422 else error.status, str(error), headers=headers)
        case UserError():
            return reply(400, str(error))
        case Overloaded():
            return reply(503, "too many requests wait; try again", code="overloaded", headers=LATER)
        case Closing():
            words = "the server is about to end; ask another one, or try again"
            return reply(503, words, code="closing", headers={**LATER, "Connection": "close"})
        case EngineFailed():
            return reply(500, f"the engine cannot answer this: {error}")
        case _:
            log.error("a request failed", exc_info=error)
            return reply(500, "the server failed; its log says why")


def reply(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    kind = TYPES.get(status, "overloaded_error" if status == 503 else "invalid_request_error")
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, dict(headers or {}))
