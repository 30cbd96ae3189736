"""Every endpoint answers with what the engine draws by itself, in the form that clients insist on."""

import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer

from tests.server.running import CONTEXT, TEMPLATE, Scripted, engine, plain_model, running, tokenizer
from trimtab.rollout.sampling import SamplingParams
from trimtab.server.request_params import ServerDefaults
from trimtab.server.sessions import ServedPolicy, stream_seed

HELLO = [{"role": "user", "content": "what is the answer"}]


@pytest.fixture(scope="module")
def server():
    with running(engine()) as server:
        yield server


def alone(ids, *, seed, session=None, limit=8, **how):
    """What the same engine draws for one prompt in a call of its own."""
    sampling = SamplingParams(stop_token_ids=(tokenizer().eos_token_id,), max_new_tokens=limit, **how)
    return engine(1).generate([ids], sampling, seeds=[stream_seed(seed, session, len(ids))])[0]


def rendered(messages, **how):
    return tokenizer().apply_chat_template(
        messages, chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False, **how
    )


def test_chat_gives_the_engines_own_tokens_and_log_probs(server):
    body = server.chat(HELLO, max_tokens=8, seed=5, logprobs=True, top_logprobs=0, return_token_ids=True, model="tiny")
    expected = alone(rendered(HELLO), seed=5)
    choice = body["choices"][0]
    assert body["prompt_token_ids"] == rendered(HELLO) and choice["token_ids"] == expected.ids
    assert choice["finish_reason"] == expected.finish
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in expected.ids]
    np.testing.assert_allclose([one["logprob"] for one in content], expected.log_probs, atol=2e-6)
    assert body["usage"]["total_tokens"] == len(rendered(HELLO)) + len(expected.ids)
    assert body["object"] == "chat.completion" and body["model"] == "tiny"


def test_tokens_are_named_by_their_texts_where_nobody_wants_ids(server):
    choice = server.chat(HELLO, max_tokens=3, logit_bias={"40": 100}, logprobs=True)["choices"][0]
    text = tokenizer().decode([40])
    assert [(one["token"], bytes(one["bytes"])) for one in choice["logprobs"]["content"]] == [(text, text.encode())] * 3
    assert all(one["logprob"] <= 0 for one in choice["logprobs"]["content"]) and "token_ids" not in choice


def test_completions_of_several_prompts_are_in_their_order(server):
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    body = server.post(
        "/v1/completions", prompt=prompts, max_tokens=8, seed=1, logprobs=0, return_token_ids=True
    ).json()
    first = alone(prompts[0], seed=1)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == prompts
    assert body["choices"][0]["token_ids"] == first.ids
    np.testing.assert_allclose(body["choices"][0]["logprobs"]["token_logprobs"], first.log_probs, atol=2e-6)
    of_text = server.post("/v1/completions", prompt="what is", max_tokens=4, seed=1, return_token_ids=True).json()
    assert of_text["choices"][0]["prompt_token_ids"] == tokenizer().encode("what is")


def test_generation_speaks_in_tokens_alone(server):
    how = {"max_tokens": 8, "temperature": 0.7, "seed": 2, "logprobs": 1, "skip_special_tokens": False}
    body = server.post(
        "/inference/v1/generate",
        {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": how},
        {"X-Session-ID": "one"},
    ).json()
    expected = alone([5, 6, 7], seed=2, session="one", temperature=0.7)
    choice = body["choices"][0]
    assert choice["token_ids"] == expected.ids
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in expected.ids]
    found = [one["logprob"] for one in choice["logprobs"]["content"]]
    np.testing.assert_allclose(found, expected.log_probs, atol=2e-6)


def test_settings_of_a_request_are_its_own(server):
    greedy = server.chat(HELLO, max_tokens=8, temperature=0, return_token_ids=True)["choices"][0]["token_ids"]
    assert greedy == alone(rendered(HELLO), seed=0, temperature=0.0).ids
    among_one = server.chat(HELLO, max_tokens=8, top_k=1, seed=9, return_token_ids=True)["choices"][0]["token_ids"]
    assert among_one == greedy
    forced = server.chat(HELLO, max_tokens=3, logit_bias={"40": 100}, return_token_ids=True)["choices"][0]
    assert forced["token_ids"] == [40] * 3 and forced["finish_reason"] == "length"
    stopped = server.chat(HELLO, logit_bias={"40": 100}, stop_token_ids=[40], return_token_ids=True)["choices"][0]
    assert stopped["token_ids"] == [40] and stopped["finish_reason"] == "stop" and stopped["stop_reason"] == 40


def test_the_likeliest_others_are_told_where_asked_for(server):
    body = server.chat(HELLO, max_tokens=4, seed=0, logprobs=True, top_logprobs=3)
    for one in body["choices"][0]["logprobs"]["content"]:
        values = [other["logprob"] for other in one["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert one["logprob"] <= values[0] + 1e-6


def test_log_probs_are_those_at_the_temperature(server):
    """Which a client can tell: between two tokens there is half as much at twice the temperature."""
    gaps = []
    for temperature in (1.0, 2.0):
        how = {"max_tokens": 1, "temperature": temperature, "logprobs": True, "top_logprobs": 5}
        likely = server.chat(HELLO, **how)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        gaps.append(likely[0]["logprob"] - likely[-1]["logprob"])
    assert gaps[0] > 0 and gaps[1] == pytest.approx(gaps[0] / 2, abs=1e-5)


def test_several_answers_differ_and_the_first_is_the_one_alone(server):
    choices = server.chat(HELLO, n=4, max_tokens=8, seed=5, return_token_ids=True)["choices"]
    assert choices[0]["token_ids"] == alone(rendered(HELLO), seed=5).ids
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 4


def test_one_seed_draws_otherwise_in_another_session_or_turn_and_alike_when_asked_again(server):
    def drawn(session, **how):
        body = server.chat("hm", headers={"X-Session-ID": session}, max_tokens=8, return_token_ids=True, **how)
        return body["choices"][0]["token_ids"]

    assert drawn("a", seed=1) == drawn("a", seed=1) != drawn("b", seed=1)
    assert drawn("a") != drawn("a")


def test_text_is_tokenised_as_it_would_be_read(server):
    body = server.post("/tokenize", messages=HELLO, model="tiny").json()
    assert body["tokens"] == rendered(HELLO) and body["count"] == len(rendered(HELLO))
    assert body["max_model_len"] == CONTEXT
    assert server.post("/tokenize", prompt="what is").json()["tokens"] == tokenizer().encode("what is")
    whole = server.post("/tokenize", messages=HELLO, add_generation_prompt=False).json()["tokens"]
    assert rendered(HELLO)[: len(whole)] == whole != rendered(HELLO)
    assert server.post("/detokenize", tokens=tokenizer().encode("what is")).json() == {"prompt": "what is"}


def test_tokens_that_a_client_has_put_together_are_read_as_they_are(server):
    ids = [*rendered(HELLO), 40, 41]
    body = server.chat(HELLO, "/v1/chat/completions/tokens", tokens=ids, max_tokens=8, seed=3, return_token_ids=True)
    assert body["prompt_token_ids"] == ids
    assert body["choices"][0]["token_ids"] == alone(ids, seed=3).ids


def test_models_health_and_metrics(server):
    model = server.client.get("/v1/models").json()["data"][0]
    assert model["id"] == "tiny" and model["max_model_len"] == CONTEXT
    assert server.client.get("/health").json() == {"status": "ok", "model": "tiny", "version": 0}
    before = server.client.get("/metrics").text
    server.chat(HELLO, max_tokens=3, logit_bias={"40": 100})
    after = server.client.get("/metrics").text

    def drawn(page):
        return int(next(line for line in page.splitlines() if line.startswith("trimtab_policy_drawn")).split()[1])

    assert drawn(after) - drawn(before) == 3
    assert "trimtab_policy_waiting_requests 0" in after.splitlines()


def test_settings_of_the_template_reach_it(server):
    plain, thinking = (
        server.post("/tokenize", messages=HELLO, chat_template_kwargs={"thinking": value}).json()["tokens"]
        for value in (False, True)
    )
    assert thinking == plain + tokenizer().encode("<think>")


def test_thoughts_and_stop_texts_are_cut_from_what_is_said():
    with running(Scripted(lambda prompt: "<think>so</think>four STOP")) as server:
        message = server.chat("2+2?")["choices"][0]["message"]
        assert message["content"] == "four STOP" and message["reasoning"] == "so"


def test_in_training_the_run_says_how_is_drawn(caplog):
    scripted = Scripted(lambda prompt: "four<|im_end|>")
    with running(scripted, pinned=SamplingParams(temperature=0.8, seed=4)) as server:
        for _ in range(3):
            server.chat("2+2?", temperature=0.1, top_p=0.2, top_k=3, presence_penalty=1.0, max_tokens=9, stop=["x"])
    assert [record.getMessage() for record in caplog.records if "training" in record.getMessage()] == [
        "temperature, top_p, top_k: requests do not say that in training, the run's options do"
    ]
    (_, sampling), *_ = scripted.asked
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.8, 1.0, 0)
    assert sampling.max_new_tokens == 9 and sampling.stop_strings == ("x",)


def test_names_of_all_tokens_are_those_of_each_alone():
    words = tokenizer()
    one, all_known = (ServedPolicy("tiny", words, ServerDefaults((), len(words) + 5), 64) for _ in range(2))
    all_known.name_all()
    assert len(all_known.names) == len(words) + 5
    assert [one.names[token] for token in range(len(words) + 5)] == list(all_known.names.values())
    assert one.names[words.eos_token_id] == ("<|im_end|>", '"<|im_end|>"')


def test_a_tokenizer_that_refuses_what_is_no_token_is_asked_for_what_is_drawn():
    policy = ServedPolicy("tiny", ByT5Tokenizer(), ServerDefaults((), 500), 64)
    policy.name_all()
    assert policy.names[ord("C") + 3] == ("C", '"C"')


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_echoed_prompts_have_the_log_probs_of_plain_transformers(server, limit):
    texts, ids = ["what is the answer", "to this"], [5, 6, 7, 8, 250]
    prompts = [*map(tokenizer().encode, texts), ids, [9]]
    fields = {"echo": True, "logprobs": 1, "max_tokens": limit, "temperature": 0, "return_token_ids": True}
    choices = server.post("/v1/completions", prompt=texts, **fields).json()["choices"]
    choices += server.post("/v1/completions", prompt=prompts[2:], **fields).json()["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        found, drawn = choice["logprobs"], choice["token_ids"]
        with torch.no_grad():
            logits = plain_model()(torch.tensor([[*prompt, *drawn]])).logits[0].float()
        expected = logits.log_softmax(-1)[:-1]
        own = expected[torch.arange(len(expected)), torch.tensor([*prompt, *drawn][1:], dtype=torch.long)]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert np.allclose(found["token_logprobs"][1:], own.numpy(), atol=1e-4)
        best = [max(likely.values()) for likely in found["top_logprobs"][1:]]
        assert np.allclose(best, expected.amax(-1).numpy(), atol=1e-4)
        # Whoever asks whether a token of the prompt is the likeliest compares the numbers.
        greedy = [value == most for value, most in zip(found["token_logprobs"][1:], best)][: len(prompt) - 1]
        assert greedy == (expected.argmax(-1)[: len(prompt) - 1] == torch.tensor(prompt[1:], dtype=torch.long)).tolist()
        assert len(found["tokens"]) == len(found["text_offset"]) == len(prompt) + len(drawn)
        assert len(drawn) <= limit
    assert [choice["text"][: len(text)] for text, choice in zip(texts, choices)] == texts


def test_a_likeliest_token_of_a_prompt_is_known_by_its_log_prob(server):
    """Of a prompt that continues as the model would, every token is; and its length may be all that the model reads."""
    drawn = server.post("/v1/completions", prompt=[5], temperature=0, max_tokens=CONTEXT - 1, ignore_eos=True)
    fields = {"prompt": "what", "temperature": 0, "max_tokens": 20, "return_token_ids": True, "ignore_eos": True}
    (choice,) = server.post("/v1/completions", fields).json()["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    fields = {"prompt": ids, "echo": True, "logprobs": 5, "max_tokens": 0, "temperature": 0}
    before = engine().prefilled_tokens
    (choice,) = server.post("/v1/completions", fields).json()["choices"]
    assert engine().prefilled_tokens - before == len(ids), "pages that others may share are not written again"
    log_probs, likely = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    assert [own == max(top.values()) for own, top in zip(log_probs[-20:], likely[-20:])] == [True] * 20
    assert drawn.status_code == 200 and len(choice["logprobs"]["tokens"]) == len(ids)
    echoed = server.post("/v1/completions", prompt="what", echo=True, max_tokens=0).json()
    assert echoed["choices"][0]["text"] == "what" and echoed["choices"][0]["logprobs"] is None
    whole = server.post("/v1/completions", prompt=[5] * CONTEXT, echo=True, logprobs=0, max_tokens=0).json()
    assert len(whole["choices"][0]["logprobs"]["token_logprobs"]) == CONTEXT
    assert whole["usage"]["completion_tokens"] == 0 and whole["choices"][0]["logprobs"]["top_logprobs"] is None


def test_log_probs_of_prompts_are_those_at_the_temperature(server):
    fields = {"prompt": [5, 6, 7], "echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 0.5}
    found = server.post("/v1/completions", fields).json()["choices"][0]["logprobs"]["token_logprobs"]
    with torch.no_grad():
        logits = plain_model()(torch.tensor([[5, 6, 7]])).logits[0].float() / 0.5
    expected = logits.log_softmax(-1)[torch.arange(2), torch.tensor([6, 7])]
    assert np.allclose(found[1:], expected.numpy(), atol=1e-4)
