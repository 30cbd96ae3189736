"""A judge that counts: an OpenAI-compatible server in a thread, which remembers what it was asked."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.json_server import answering

RESPONSE = re.compile(r"<response>\n(.*)\n</response>", re.DOTALL)


def digits(response: str) -> int:
    """The score of an answer, from 0 to 10."""
    return min(10, sum(letter.isdigit() for letter in response))


def completion(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def score_digits(response: str) -> tuple[int, Any]:
    return 200, completion(f"It has some.\nScore: {digits(response)}")


@dataclass
class Judge:
    url: str
    asked: list[str] = field(default_factory=list)
    headers: list[str | None] = field(default_factory=list)


@contextlib.contextmanager
def judging(
    answer: Callable[[str], tuple[int, Any]] = score_digits, models: Any = "tiny-judge", **how: Any
) -> Iterator[Judge]:
    """`answer`: status and reply to a question about this response; `models`: a name, or status and reply."""
    judge = Judge("")

    def reply(body: Any, request: Any) -> tuple[int, Any]:
        judge.headers.append(request.headers.get("Authorization"))
        if body is None:
            assert request.path == "/v1/models"
            return (200, {"data": [{"id": models}]}) if isinstance(models, str) else models
        assert request.path == "/v1/chat/completions"
        question = body["messages"][0]["content"]
        judge.asked.append(question)
        found = RESPONSE.search(question)
        return answer(found.group(1) if found else question)

    with answering(reply, with_request=True, **how) as url:
        judge.url = url
        yield judge
