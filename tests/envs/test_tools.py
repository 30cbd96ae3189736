"""Tools: what a model is told of them, and how they are called."""

import json
from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from tests.envs.playing import now
from trimtab.envs.tools import BadArguments, UnknownTool, call_tool, tool_schema, tool_schemas


def multiply(x: float, y: float = 1.0) -> float:
    """
    Multiplies two numbers.

    It is exact for small ones.

    Args:
        x: The first number
        y: The second number,
            which may be left out: 1 then
    """
    return x * y


def search(words: list[str], kind: Literal["web", "news"], limit: int | None = None, **_: Any) -> dict[str, int]:
    """Looks for words."""
    return {word: limit or 0 for word in words}


def everything(
    a: int,
    b: bool,
    c: dict[str, float],
    d: tuple[int, str],
    e: Union[int, str],  # noqa: UP007
    f: Optional[list[int]],  # noqa: UP045
    g: str | list[int],
    h: Any,
    i: dict,
    j: Literal[1, "one"] = 1,
    k: list | None = None,
) -> list[dict[str, int]]:
    """Takes all kinds.

    Args:
        a: one
        b: two
        c: three
        d: four
        e: five
        f: six
        g: seven
        h: eight
        i: nine (choices: ["tea", "coffee"])
        j: ten
        k: eleven: the last

    Returns:
        what there
        is

    Raises:
        ValueError: never
    """
    return []


class Room:
    def look(self, direction: str) -> str:
        """Looks around.

        Args:
            direction: Where to

        Returns:
            What is there
        """
        return f"a wall in the {direction}"

    async def wait(self, turns: int):
        """Waits.

        Args:
            turns: how long
        """
        return {"waited": turns}


@pytest.mark.parametrize("tool", [multiply, everything, Room().look, Room().wait], ids=lambda tool: tool.__name__)
def test_schemas_are_those_of_transformers(tool: Callable[..., Any]) -> None:
    # Templates write them as they stand, so their order counts.
    assert json.dumps(tool_schema(tool)) == json.dumps(get_json_schema(tool))


def test_a_tool_that_says_little_is_told_as_far_as_it_goes() -> None:
    def bare(x, y=2):
        return x

    parameters = {"type": "object", "properties": {"x": {}, "y": {}}, "required": ["x"]}
    function = {"name": "bare", "description": "", "parameters": parameters}
    assert tool_schemas([bare]) == [{"type": "function", "function": function}]


def test_tools_that_cannot_be_told_apart_or_called_by_name_are_refused() -> None:
    with pytest.raises(TypeError, match="two tools are called multiply"):
        tool_schemas([multiply, multiply])
    with pytest.raises(TypeError, match="search: its parameter"):
        tool_schemas([search])


def test_a_tool_is_called_with_arguments_as_a_dict_or_as_json() -> None:
    tools: list[Callable[..., Any]] = [multiply, Room().look, Room().wait]
    assert call_tool(tools, "multiply", {"x": 2, "y": 3.5}) == "7.0"
    assert call_tool(tools, "multiply", '{"x": 2}') == "2.0"
    assert call_tool(tools, "look", {"direction": "north"}) == "a wall in the north"
    assert json.loads(now(call_tool(tools, "wait", {"turns": 3}))) == {"waited": 3}


@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [
        ("divide", {}, UnknownTool, "there is no tool divide, but multiply"),
        (
            "multiply",
            {"z": 1},
            BadArguments,
            r"multiply\(x: float, y: float = 1.0\).*: missing a required argument: 'x'",
        ),
        ("multiply", {"x": 1, "z": 1}, BadArguments, "unexpected keyword argument 'z'"),
        ("multiply", "{x", BadArguments, "are no JSON"),
        ("multiply", "[1]", BadArguments, "are list"),
        ("multiply", {"x": "abc"}, BadArguments, r'multiply\(x: float.*: x must be float, not "abc"'),
        ("multiply", {"x": None}, BadArguments, "x must be float, not null"),
    ],
)
def test_a_call_that_goes_wrong_says_how(name: str, arguments: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call_tool([multiply], name, arguments)


def shop(amount: int, place: tuple[int, str] = (0, ""), limit: int = None):  # noqa: RUF013
    """Buys."""
    return [amount, *place, limit]


FITTING = {"a": 1, "b": True, "c": {"k": 2}, "d": [1, "x"], "e": "y", "f": None, "g": [3], "h": {}, "i": {"z": 0}}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"j": "one", "k": [1, "two"], "e": 7, "f": [1], "g": "text"}, None),
        ({"a": "1"}, 'a must be int, not "1"'),
        ({"a": 1.0}, "a must be int, not 1.0"),
        ({"a": True}, "a must be int, not true"),
        ({"b": 1}, "b must be bool, not 1"),
        ({"c": {"k": "2"}}, r"c\['k'\] must be float, not \"2\""),
        ({"c": []}, r"c must be dict\[str, float\], not \[\]"),
        ({"d": [1]}, r"d must be tuple\[int, str\], not \[1\]"),
        ({"d": ["x", 1]}, r"d\[0\] must be int"),
        ({"e": 1.5}, "e must be Union"),
        ({"f": ["1"]}, r"f must be Optional\[list\[int\]\], not \[\"1\"\]"),
        ({"i": "tea"}, "i must be dict"),
        ({"j": True}, r"j must be Literal\[1, 'one'\], not true"),
        ({"k": "x" * 999}, r"k must be list \| None, not \"x{79}\.\.\."),
    ],
)
def test_arguments_are_checked_against_annotations(changed: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert call_tool([everything], "everything", FITTING | changed) == "[]"
        return
    with pytest.raises(BadArguments, match=words):
        call_tool([everything], "everything", FITTING | changed)


def test_arguments_are_passed_on_as_annotated() -> None:
    got = []

    def keep(x: float, pair: tuple[int, ...], known: Callable[..., Any] = print, loose=0):
        """Keeps them."""
        got.append((x, pair, known, loose))

    call_tool([keep], "keep", {"x": 1, "pair": [1, 2], "known": "anything", "loose": [1]})
    assert got == [(1, (1, 2), "anything", [1])]
    assert call_tool([shop], "shop", {"amount": 2, "limit": None}) == '[2, 0, "", null]', (
        "its default says that it may be"
    )
