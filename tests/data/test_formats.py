from types import SimpleNamespace

import pytest

from trimtab.data.formats import find_supervised_columns, read_supervised
from trimtab.errors import UserError


def options(**changes):
    return SimpleNamespace(**{"input_key": "input", "output_key": None, "pretrain_mode": False, **changes})


def read(row, **changes):
    columns = find_supervised_columns(list(row), options(**changes), row)
    return read_supervised(row, columns, "row 1")


USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def test_key_options_name_the_columns():
    record = read({"question": "q", "answer": "a", "messages": []}, input_key="question", output_key="answer")
    assert (record.prompt, record.response) == ("q", "a")


def test_known_layouts_are_recognised_without_key_options():
    assert read({"messages": [USER, ASSISTANT], "id": 3}).prompt == [USER, ASSISTANT]
    assert read({"input": [USER, ASSISTANT]}).prompt == [USER, ASSISTANT]
    pair = read({"prompt": "q", "completion": "a", "text": "t"})
    assert (pair.prompt, pair.response) == ("q", "a")
    pair = read({"prompt": [USER], "completion": [ASSISTANT]})
    assert (pair.prompt, pair.response) == ([USER], [ASSISTANT])
    columns = find_supervised_columns(["text"], options())
    assert columns.whole_text and columns.literal


def test_sharegpt_speakers_become_roles():
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert read({"conversations": turns}).prompt == [{"role": "system", "content": "s"}, USER, ASSISTANT]


def test_keys_filled_with_null_by_the_storage_are_dropped_from_messages():
    call = {**ASSISTANT, "content": None, "tool_calls": [{"name": "f"}]}
    record = read({"messages": [{**USER, "tool_calls": None}, call]})
    assert record.prompt == [USER, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]


def test_tools_are_taken_as_a_list_or_as_json_text():
    for tools in ([{"name": "f"}], '[{"name": "f"}]'):
        assert read({"messages": [USER, ASSISTANT], "tools": tools}).tools == [{"name": "f"}]
    assert read({"messages": [USER, ASSISTANT], "tools": None}).tools is None
    with pytest.raises(UserError, match=r"row 1.*tools.*not valid JSON"):
        read({"messages": [USER, ASSISTANT], "tools": "[{"})


def test_a_response_in_messages_makes_a_string_prompt_a_user_turn():
    record = read({"q": "q", "a": [ASSISTANT]}, input_key="q", output_key="a")
    assert record.prompt == [USER]


def test_pretrain_mode_reads_the_input_column_whole():
    columns = find_supervised_columns(["input", "messages"], options(pretrain_mode=True), {"input": "t"})
    assert columns.prompt == "input" and columns.whole_text


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"input_key": "question"}, "no column 'question' (--input_key) in the data: found a, b"),
        ({"input_key": "a", "output_key": "reply"}, "no column 'reply' (--output_key) in the data: found a, b"),
        ({}, "no column 'input' (--input_key)"),
    ],
)
def test_a_missing_column_is_named_with_its_flag_and_the_columns_found(changes, words):
    with pytest.raises(UserError) as caught:
        find_supervised_columns(["a", "b"], options(**changes))
    assert words in str(caught.value) and "a, b" in str(caught.value)


def test_a_default_output_key_names_a_column_where_there_is_one_and_hides_no_known_layout():
    record = read({"input": "q", "output": "a", "messages": [USER]}, output_key="output")
    assert (record.prompt, record.response) == ("q", "a")
    assert read({"messages": [USER, ASSISTANT]}, output_key="output").prompt == [USER, ASSISTANT]
    assert read({"talk": [USER, ASSISTANT]}, input_key="talk", output_key="output").response is None
    with pytest.raises(UserError, match="no column 'output'"):
        read({"question": "q"}, input_key="question", output_key="output")


def test_an_input_column_without_a_response_is_refused_with_advice():
    with pytest.raises(UserError, match=r"--output_key.*--pretrain_mode.*columns found: input, output"):
        read({"input": "q", "output": "a"})
    with pytest.raises(UserError, match=r"row 1.*--output_key"):
        read({"question": "q"}, input_key="question")


@pytest.mark.parametrize(
    "row, words",
    [
        ({"prompt": "q", "completion": None}, "column 'completion' holds nothing (null)"),
        ({"prompt": "q", "completion": 72}, "column 'completion' holds a number (72)"),
        ({"prompt": True, "completion": "a"}, "column 'prompt' holds a truth value"),
        ({"messages": []}, "empty conversation"),
        ({"messages": ["hello"]}, "message 1 of column 'messages' is a string"),
        ({"messages": [USER, {"content": "a"}]}, "message 2 of column 'messages' has no role"),
        ({"messages": [USER, {"role": "assistant", "content": 4}]}, "message 2 of column 'messages' (assistant)"),
        ({"messages": [USER, {"role": "assistant"}]}, "holds nothing (null) as content"),
    ],
)
def test_values_of_the_wrong_type_are_named_with_row_and_column(row, words):
    with pytest.raises(UserError) as caught:
        read(row)
    assert str(caught.value).startswith("row 1: ") and words in str(caught.value)
