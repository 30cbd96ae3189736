"""A vLLM engine does what every engine does, and answers from the weights that it was given last."""

import numpy as np
import pytest
import torch

from tests.vllm.conftest import engine_of, gap, move, write_model
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.errors import UserError
from trimtab.rollout.engine import Engine, ReceivingEngine
from trimtab.rollout.sampling import SamplingParams

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12]]
LIMIT = 1e-3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An engine and the policy whose weights it takes: tied."""
    folder = tmp_path_factory.mktemp("tied")
    policy = write_model(folder, tie_word_embeddings=True)
    engine = engine_of(folder, policy, tokenizer=make_tokenizer())
    yield engine, policy
    engine.close()


def test_it_is_an_engine_and_not_exact(made):
    engine, _ = made
    assert isinstance(engine, Engine) and isinstance(engine, ReceivingEngine) and not engine.exact


def test_answers_have_the_trainers_log_probs_at_the_sampling_temperature(made):
    engine, policy = made
    rollouts = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, n=3, temperature=0.7), seeds=[1, 2, 3])
    assert [(r.prompt, r.sample) for r in rollouts] == [(p, k) for p in range(3) for k in range(3)]
    assert all(len(r.ids) == 12 and r.finish == "length" and r.log_probs.dtype == np.float32 for r in rollouts)
    assert gap(rollouts, policy, 0.7) < LIMIT
    assert gap(rollouts, policy, 1.0) > 0.1
    assert len({tuple(r.ids) for r in rollouts}) == 9


def test_a_prompts_seed_decides_its_answers_whatever_else_is_asked(made):
    engine, _ = made
    sampling = SamplingParams(max_new_tokens=10, n=2)
    together = engine.generate(PROMPTS, sampling, seeds=[1, 2, 3])
    alone = engine.generate(PROMPTS[1:2], sampling, seeds=[2])
    assert [r.ids for r in together if r.prompt == 1] == [r.ids for r in alone]
    others = engine.generate(PROMPTS[1:2], sampling, seeds=[4])
    assert [r.ids for r in others] != [r.ids for r in alone]


def test_limits_and_stop_tokens_end_answers(made):
    engine, _ = made
    limited = engine.generate(PROMPTS, SamplingParams(max_new_tokens=9), limits=[1, 4, 9])
    assert [len(r.ids) for r in limited] == [1, 4, 9]
    stops = tuple(range(3, 40))
    stopped = engine.generate(PROMPTS, SamplingParams(max_new_tokens=30, stop_token_ids=stops, n=4))
    assert {r.finish for r in stopped} == {"stop"}
    assert all(r.ids[-1] in stops and not set(r.ids[:-1]) & set(stops) for r in stopped)
    late = engine.generate(PROMPTS, SamplingParams(max_new_tokens=30, stop_token_ids=stops, min_new_tokens=5, n=4))
    assert all(len(r.ids) >= 6 for r in late)


def test_forbidden_and_favoured_tokens(made):
    engine, _ = made
    forbidden = tuple(range(20, 61))
    rollouts = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, n=4, forbidden_tokens=forbidden))
    assert not {token for r in rollouts for token in r.ids} & set(forbidden)
    rollouts = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, logit_bias={33: 90.0}))
    assert {token for r in rollouts for token in r.ids} == {33}
    for wrong in ({"logit_bias": {3: 101.0}}, {"plain_log_probs": True, "temperature": 0.5}):
        with pytest.raises(UserError, match="vLLM"):
            engine.generate(PROMPTS, SamplingParams(max_new_tokens=2, **wrong))


def test_requests_with_settings_of_their_own_get_what_they_get_alone(made):
    engine, policy = made
    settings = [
        SamplingParams(max_new_tokens=9),
        SamplingParams(max_new_tokens=12, temperature=0),
        SamplingParams(max_new_tokens=10, temperature=0.7, top_p=0.8, min_p=0.1),
        SamplingParams(max_new_tokens=30, stop_token_ids=tuple(range(3, 40)), min_new_tokens=4),
        SamplingParams(max_new_tokens=40, stop_strings=("1", "2"), n=2),
        SamplingParams(max_new_tokens=5, temperature=0.5, top_log_probs=3),
    ]
    alone = [engine.generate(PROMPTS[:1], setting, seeds=[7]) for setting in settings]
    with engine.session(settings[0]) as session:
        for setting in settings:
            session.add(PROMPTS[0], seed=7, sampling=None if setting is settings[0] else setting)
        with pytest.raises(UserError, match="has token 99999"):
            session.add(PROMPTS[0], sampling=SamplingParams(stop_token_ids=(99999,)))
        found = sorted(session, key=lambda r: (r.prompt, r.sample))
    assert [(r.ids, r.finish) for r in found] == [(r.ids, r.finish) for answers in alone for r in answers]
    alternatives = found[-1].alternatives
    ids = torch.tensor([found[-1].prompt_ids + found[-1].ids])
    with torch.no_grad():
        top = (policy.model(ids).logits[0, len(PROMPTS[0]) - 1 : -1] / 0.5).log_softmax(-1).topk(3)
    assert alternatives.tokens.tolist() == top.indices.tolist()
    np.testing.assert_allclose(alternatives.log_probs, top.values, atol=LIMIT)
    assert found[0].alternatives is None


def test_stop_strings_cut_answers_where_the_text_first_holds_one(made):
    engine, _ = made
    plain = engine.generate(PROMPTS, SamplingParams(max_new_tokens=40), seeds=[1, 2, 3])
    decode = engine.tokenizer.decode
    stop = decode(plain[0].ids)[10:12]
    cut = engine.generate(PROMPTS, SamplingParams(max_new_tokens=40, stop_strings=(stop,)), seeds=[1, 2, 3])
    assert cut[0].finish == "stop" and stop in decode(cut[0].ids) and stop not in decode(cut[0].ids[:-1])
    assert cut[0].ids == plain[0].ids[: len(cut[0].ids)] and len(cut[0].log_probs) == len(cut[0].ids)


def test_greedy_answers_are_the_most_likely_ones(made):
    engine, policy = made
    (rollout,) = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=6, temperature=0))
    ids = list(PROMPTS[0])
    with torch.no_grad():
        for token in rollout.ids:
            assert policy.model(torch.tensor([ids])).logits[0, -1].argmax() == token
            ids.append(token)
    assert gap([rollout], policy, 1.0) < LIMIT


def test_answers_come_as_they_finish_and_can_be_aborted(made):
    engine, policy = made
    stream = engine.stream(PROMPTS, SamplingParams(max_new_tokens=60), limits=[2, 60, 60])
    first = next(stream)
    assert (first.prompt, first.finish) == (0, "length")
    engine.abort([1])
    second = next(stream)
    assert (second.prompt, second.finish) == (1, "abort") and 0 < len(second.ids) < 60
    assert gap([second], policy) < LIMIT
    with pytest.raises(UserError, match="at work"):
        engine.weights_changed(1)
    stream.close()
    assert not engine.llm.has_unfinished_requests()


def test_requests_may_come_while_others_run(made):
    engine, _ = made
    with engine.session(SamplingParams(max_new_tokens=6)) as session:
        session.add(PROMPTS[0], seed=1)
        session.step()
        session.step()
        assert len(session.output_ids(0)) >= 1
        session.add(PROMPTS[1], seed=2, limit=2)
        assert sorted((r.prompt, len(r.ids)) for r in session) == [(0, 6), (1, 2)]


def test_a_prompt_that_does_not_fit_is_refused(made):
    engine, _ = made
    with pytest.raises(UserError, match="context is 128"):
        engine.generate([[5] * 120], SamplingParams(max_new_tokens=9))
    with pytest.raises(UserError, match="outside the model's vocabulary"):
        engine.generate([[61]], SamplingParams(max_new_tokens=1))
    assert len(engine.generate(PROMPTS, SamplingParams(max_new_tokens=1))) == 3


def test_after_an_update_answers_come_from_the_new_weights(made):
    engine, policy = made
    move(policy)
    before = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12), seeds=[1, 2, 3])
    assert gap(before, policy) > 0.05
    engine.weights_changed(5)
    after = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12), seeds=[1, 2, 3])
    assert gap(after, policy) < LIMIT and {v for r in after for v in r.versions} == {5}


def test_sleeping_and_waking_changes_nothing(made):
    engine, _ = made
    before = engine.generate(PROMPTS, SamplingParams(max_new_tokens=5), seeds=[1, 2, 3])
    engine.sleep()
    after = engine.generate(PROMPTS, SamplingParams(max_new_tokens=5), seeds=[1, 2, 3])
    assert [r.ids for r in before] == [r.ids for r in after]


def test_a_head_of_its_own_is_renewed_too(tmp_path):
    policy = write_model(tmp_path, tie_word_embeddings=False)
    engine = engine_of(tmp_path, policy)
    move(policy)
    engine.weights_changed(1)
    assert gap(engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, n=4)), policy) < LIMIT
    engine.close()


@pytest.mark.parametrize("adapters", [True, False], ids=["adapter", "merged"])
def test_lora_goes_to_the_engine_both_ways(adapters, tmp_path):
    from trimtab.config.training_options import LoraOptions
    from trimtab.models.lora import add_adapters
    from trimtab.models.policy import Policy

    plain = write_model(tmp_path, tie_word_embeddings=True)
    options = LoraOptions(lora_rank=4, lora_alpha=8, target_modules=("all-linear",))
    policy = Policy(add_adapters(plain.model, options)).eval()
    engine = engine_of(tmp_path, policy, adapters=adapters, adapter_rank=4 if adapters else 0)
    for version in (1, 2):
        move(policy, 0.3)
        engine.weights_changed(version)
        rollouts = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, n=2))
        assert gap(rollouts, policy) < LIMIT and set(rollouts[0].versions) == {version}
    engine.close()


def test_a_model_that_vllm_breaks_on_is_refused_in_one_line(tmp_path, monkeypatch):
    from vllm.v1.engine.llm_engine import LLMEngine

    def break_on(arguments):
        raise AttributeError("'Lfm2Config' object has no attribute 'conv_dim'")

    monkeypatch.setattr(LLMEngine, "from_engine_args", break_on)
    write_model(tmp_path)
    refused = "^--rollout_engine vllm: the engine cannot be started: 'Lfm2Config' object has no attribute 'conv_dim'$"
    with pytest.raises(UserError, match=refused):
        engine_of(tmp_path, None)
