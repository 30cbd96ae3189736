"""In a session what the model said is never read otherwise than it was drawn."""

import json

import pytest

from tests.server.running import InThreads, Scripted, engine, running, tokenizer
from trimtab.server.request_params import InvalidRequest
from trimtab.server.sessions import TURN, SessionStore

SAYS = {"role": "assistant"}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def asked(words):
    return {"role": "user", "content": words}


def turn(server, messages, session="one", **fields):
    """The ids that were read, those that were drawn, and the message."""
    body = server.chat(messages, f"/s/{session}/v1/chat/completions", return_token_ids=True, **fields)
    choice = body["choices"][0]
    return body["prompt_token_ids"], choice["token_ids"], choice["message"]


def test_turns_go_on_from_what_was_drawn_token_by_token():
    with running(engine()) as server:
        messages = [asked("what is")]
        before = []
        for number in range(4):
            read, drawn, message = turn(server, messages, max_tokens=12, seed=0)
            assert read[: len(before)] == before
            before = read + drawn
            messages += [message, asked(f"and {number}")]
        trace = server.client.get("/s/one/trace").json()
        kept = [token for part in trace["turns"] for token in part["read_token_ids"] + part["token_ids"]]
        assert kept == before and trace["branches"] == [[0, 1, 2, 3]]
        # A model of noise draws tokens that no text gives back: without a session the history is another.
        anew = server.post("/tokenize", messages=messages[:-2]).json()["tokens"]
        assert anew != before[: len(anew)]


def test_the_trace_has_log_probs_finish_and_versions():
    with running(Scripted(lambda prompt: "four<|im_end|>")) as server:
        read, drawn, _ = turn(server, [asked("2+2?")])
        (only,) = server.client.get("/s/one/trace").json()["turns"]
    assert only["read_token_ids"] == read and only["token_ids"] == drawn
    assert only["logprobs"] == [-(place + 1) / 8 for place in range(len(drawn))]
    assert only["versions"] == [7] * len(drawn) and only["finish_reason"] == "stop" and only["after"] is None


def test_a_turn_that_was_cut_gets_its_end_before_the_next():
    with running(Scripted(lambda prompt: "aaaaaaaaaaaaaaaaaaaaaaa")) as server:
        read, drawn, message = turn(server, [asked("go")], max_tokens=4)
        then, _, _ = turn(server, [asked("go"), message, asked("on")], max_tokens=4)
    assert then[: len(read + drawn)] == read + drawn
    assert tokenizer().decode(then[len(read + drawn) :]).startswith("<|im_end|>\n<|im_start|>user\non<|im_end|>\n")


def test_a_history_that_was_rewritten_is_a_new_branch():
    with running(Scripted(lambda prompt: "four<|im_end|>")) as server:
        _, _, message = turn(server, [asked("2+2?")])
        turn(server, [asked("2+2?"), message, asked("sure?")])
        turn(server, [asked("2+2?"), {**SAYS, "content": "five"}, asked("sure?")])
        turn(server, [asked("2+2?"), message, asked("really?")])
        trace = server.client.get("/s/one/trace").json()
    assert trace["branches"] == [[0, 1], [2], [0, 3]]


def test_what_clients_change_of_a_message_does_not_make_it_another():
    """Thoughts are left out, null is an empty text, calls have other names and spaces, parts of text are text."""
    says = ['<think>add them</think><tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call><|im_end|>']
    with running(Scripted(lambda prompt: says[0])) as server:
        read, drawn, message = turn(server, [asked("2+2?")], tools=[ADD])
        assert message["content"] is None and message["reasoning"] == "add them"
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1, "b": [2]}
        again = {"role": "assistant", "content": "", "tool_calls": [{"id": "mine", "type": "function"}]}
        again["tool_calls"][0]["function"] = {"name": "add", "arguments": '{"b":[2],  "a":1}'}
        result = {"role": "tool", "tool_call_id": "mine", "content": [{"type": "text", "text": "3"}]}
        says[0] = "three<|im_end|>"
        then, _, _ = turn(server, [asked("2+2?"), again, result], tools=[ADD])
    assert then[: len(read + drawn)] == read + drawn
    assert tokenizer().decode(then[len(read + drawn) :]) == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


def test_calls_of_tools_are_read_where_there_are_tools():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    with running(Scripted(lambda prompt: f"so {call}<|im_end|>")) as server:
        choice = server.chat("2+2?", tools=[ADD])["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "so"
        for fields in ({}, {"tools": [ADD], "tool_choice": "none"}):
            choice = server.chat("2+2?", **fields)["choices"][0]
            assert choice["finish_reason"] == "stop" and choice["message"]["content"] == f"so {call}"
            assert "tool_calls" not in choice["message"]


def test_the_session_is_named_by_path_header_body_or_key():
    with running(Scripted(lambda prompt: "x<|im_end|>")) as server:
        server.chat("a", "/s/path/v1/chat/completions", {"X-Session-ID": "header"}, session_id="body")
        server.chat("a", headers={"X-Session-ID": "header", "Authorization": "Bearer key"}, session_id="body")
        server.chat("a", headers={"Authorization": "Bearer key"}, session_id="body")
        server.chat("a", headers={"Authorization": "Bearer key"})
        server.chat("a")
        assert len(server.server.sessions) == 4
        for name in ("path", "header", "body", "key"):
            assert len(server.client.get(f"/s/{name}/trace").json()["turns"]) == 1
        assert server.client.get("/s/nobody/trace").status_code == 404


def test_the_token_of_the_server_is_no_session():
    with running(Scripted(lambda prompt: "x<|im_end|>"), token="secret") as server:
        server.chat("a", headers={"Authorization": "Bearer secret"})
        assert len(server.server.sessions) == 0


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("token", [None, "secret"])
def test_private_sessions_are_gone_on_with_and_traced_by_their_secret_names_alone(token, processes):
    headers = {"Authorization": f"Bearer {token or 'anything'}"}
    answering = Scripted(lambda prompt: "four<|im_end|>")
    threads = InThreads(processes) if processes else None
    with running(answering, token=token, private=True, processes=threads) as server:
        names = [server.post("/sessions", headers=headers).json()["session"] for _ in range(3)]
        assert len(set(names)) == 3 and all(len(name) >= 32 for name in names)
        path = f"/s/{names[0]}/v1/chat/completions"
        server.chat("hm", path, headers)
        assert len(server.client.get(f"/s/{names[0]}/trace", headers=headers).json()["turns"]) == 1
        assert server.client.get(f"/s/{names[1]}/trace", headers=headers).json()["turns"] == []
        for guess in ("one", names[0][:-1], names[0] + "a", names[0].swapcase(), "%00", "a" * 500):
            assert server.client.get(f"/s/{guess}/trace", headers=headers).status_code == 404
            reply = server.post(f"/s/{guess}/v1/chat/completions", {"messages": [asked("hm")]}, headers)
            assert reply.status_code == 404, guess
        for named in ({"X-Session-ID": "one"}, {"X-Session-ID": "one", "Authorization": "Bearer secret"}):
            reply = server.post("/v1/chat/completions", {"messages": [asked("hm")]}, headers | named)
            assert reply.status_code == 404 and "POST /sessions" in reply.json()["error"]["message"]
        server.chat("hm", "/v1/chat/completions", headers)  # without a session, as ever
        assert server.client.get("/trace", headers=headers).status_code == 404
        assert len(server.server.sessions) == 3
        if token is not None:
            assert server.post("/sessions").status_code == 401


def test_sessions_that_are_asked_for_and_never_used_take_no_more_than_their_share():
    records = SessionStore(max_tokens=10 * TURN, private=True)
    names = [records.issue() for _ in range(50)]
    assert len(records) == 10 and records.find(names[-1]) is not None and records.held == 10 * TURN
    with pytest.raises(InvalidRequest):
        records.get_or_create(names[0])


def test_sessions_are_issued_only_where_they_are_private():
    with running(Scripted(lambda prompt: "four<|im_end|>")) as server:
        assert server.post("/sessions").status_code == 404


def test_requests_in_tokens_are_recorded_behind_what_they_go_on_from():
    with running(engine()) as server:
        ids, path = [5, 6, 7], "/s/tokens/inference/v1/generate"
        for _ in range(3):
            body = server.post(path, token_ids=ids, sampling_params={"max_tokens": 5}).json()
            ids = [*ids, *body["choices"][0]["token_ids"], 9]
        server.post(path, token_ids=[8, 8], sampling_params={"max_tokens": 5})
        trace = server.client.get("/s/tokens/trace").json()
        far = server.post("/s/tokens/v1/chat/completions/tokens", messages=[asked("a")], tokens=[2**40])
    assert trace["branches"] == [[0, 1, 2], [3]]
    assert [part["read_token_ids"] for part in trace["turns"]] == [[5, 6, 7], [9], [9], [8, 8]]
    assert far.status_code == 400


def test_a_template_that_cannot_be_appended_to_is_rendered_anew():
    """It shows nothing of what the model said."""
    forgetful = (
        "{% for message in messages %}{% if message.role == 'user' %}<|im_start|>{{ message.content }}<|im_end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    with running(Scripted(lambda prompt: "x<|im_end|>"), template=forgetful) as server:
        _, _, message = turn(server, [asked("a")])
        read, _, _ = turn(server, [asked("a"), message, asked("b")])
        assert tokenizer().decode(read) == "<|im_start|>a<|im_end|><|im_start|>b<|im_end|>>"
        assert server.client.get("/s/one/trace").json()["branches"] == [[0], [1]]
