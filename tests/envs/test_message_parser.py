import json

import pytest

from tests.data.templates import CHATML
from tests.envs.chat_templates import ADD, tokenizer_of
from trimtab.envs.chat_tokens import MessageParser


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(CHATML)


def parsed(tokenizer, text, **options):
    ids = tokenizer.encode(text, add_special_tokens=False)
    return MessageParser(tokenizer, [ADD]).message(ids, options.get("prefix", []), {tokenizer.eos_token_id})


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_words_without_the_token_that_ended_them(tokenizer):
    ids = tokenizer.encode("It is four.<|im_end|>", add_special_tokens=False)
    parsing = MessageParser(tokenizer)
    assert parsing.text(ids, {tokenizer.eos_token_id}) == "It is four."
    assert parsing.text(ids[:-1], {tokenizer.eos_token_id}) == "It is four."
    assert parsing.message(ids, [], {tokenizer.eos_token_id}) == {"role": "assistant", "content": "It is four."}


def test_calls_in_their_order_and_the_words_around_them(tokenizer):
    text = f"Let me see.\n{call('add', {'a': 1})}\n{call('other', {})}<|im_end|>"
    message = parsed(tokenizer, text)
    assert message["content"] == "Let me see."
    assert [made["function"] for made in message["tool_calls"]] == [
        {"name": "add", "arguments": {"a": 1}},
        {"name": "other", "arguments": {}},
    ]
    assert [made["id"] for made in message["tool_calls"]] == ["call_0", "call_1"]


@pytest.mark.parametrize(
    "inside", ['{"name": "add"', "[1]", '{"name": 3, "arguments": {}}', '{"name": "a", "arguments": "no"}', "[" * 9999]
)
def test_what_does_not_parse_stays_text(tokenizer, inside):
    broken = f"<tool_call>{inside}</tool_call>"
    assert parsed(tokenizer, broken) == {"role": "assistant", "content": broken}
    both = parsed(tokenizer, broken + call("add", {"a": 2}))
    assert both["content"] == broken and len(both["tool_calls"]) == 1


def test_thoughts_are_apart_and_call_nothing(tokenizer):
    for opening in ("<think>", ""):  # a prompt may have opened it
        prefix = [] if opening else tokenizer.encode("<think>")  # the template may have begun the thought
        message = parsed(tokenizer, f"{opening}\n{call('add', {})}\n</think>\n\nFour.<|im_end|>", prefix=prefix)
        assert message["content"] == "Four." and "tool_calls" not in message
        assert message["reasoning_content"] == call("add", {})
        assert parsed(tokenizer, f"{opening}so", prefix=prefix) == {
            "role": "assistant",
            "reasoning_content": "so",
            "content": "",
        }


def test_a_tokenizer_with_a_response_template_is_asked(tokenizer):
    own = tokenizer_of(CHATML)
    own.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+) ",
                "close_pattern": r";",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    prefix = own.encode("<|im_start|>assistant\n", add_special_tokens=False)
    message = parsed(own, 'CALL add {"a": 5};<|im_end|>', prefix=prefix)
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 5}}
    assert parsed(own, "Four.<|im_end|>", prefix=prefix)["content"] == "Four."


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" + "\n" * 100_000,
        "<tool_call>" * 10_000 + " " * 10_000,
        "\n" * 100_000,
        "<think>" + "\n" * 100_000,
        "<tool_call>x</tool_call>" * 10_000,
    ],
    ids=["a call without an end", "calls in calls", "space", "a thought without an end", "what does not parse"],
)
def test_what_ends_nothing_is_read_in_one_go(tokenizer, text):
    """It stays text. Patterns that go back and forth take minutes for these."""
    assert MessageParser(tokenizer).hermes(text) == {"role": "assistant", "content": text}


def test_space_around_calls_and_thoughts(tokenizer):
    parsing, made = MessageParser(tokenizer), call("add", {"a": 1})
    message = parsing.hermes(f"  <think>\n so \n</think> \n One:\t{made} \n two\n{made}\n")
    assert (message["reasoning_content"], message["content"]) == (" so ", "One:\ttwo")
    assert len(message["tool_calls"]) == 2
