"""The built-in engine against Hugging Face's own generation, against the trainer's log-probs, and against chance."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.rollout.answers import check_log_probs, converse, ids_of
from tests.rollout.test_sampler import assert_frequencies, renormalised
from tests.samples import random_examples
from tests.tiny import (
    CYCLIC_FAMILIES,
    LATENT_FAMILIES,
    RECURRENT_FAMILIES,
    VARIANT_FAMILIES,
    VOCABULARY,
    tiny_model,
)
from trimtab.data.batches import TokenBatch
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.builtin.scheduler import Scheduler
from trimtab.rollout.sampling import SamplingParams

FAMILIES = ["llama", "gpt2", "mixtral", "mistral", "qwen2", "qwen2_moe_window", "phimoe", "gemma2", "gpt_oss"]
FAMILIES += ["gemma4_text", "qwen3_5_text", "nemotron_h", "bloom"]
TIGHT = {"kv_tokens": 160, "max_num_seqs": 8, "page_size": 8}
MEMORIES = [{}, TIGHT, {"max_num_batched_tokens": 10}]


def prompts(lengths=(5, 17, 33, 16, 1, 48, 7), seed=0, vocabulary=VOCABULARY):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocabulary, n).tolist() for n in lengths]


def policy_of(family="llama", **changes):
    policy = Policy(tiny_model(family, **changes))
    choose_path(policy)
    return policy


def hugging_face(model, ids, count, **settings):
    model.generation_config.eos_token_id = None
    mask = torch.ones(1, len(ids), dtype=torch.long)
    out = model.generate(
        torch.tensor([ids]), attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, **settings
    )
    return out[0, len(ids) :].tolist()


def check_greedy_answers(family, **settings):
    """That they are Hugging Face's in any memory; the policy, and the answers."""
    model = tiny_model(family)
    expected = [hugging_face(model, ids, 20, **settings) for ids in prompts()]
    policy = Policy(model)
    choose_path(policy)
    sampling = SamplingParams(max_new_tokens=20, temperature=0, **settings)
    for memory in MEMORIES:
        assert ids_of(BuiltinEngine(policy, **memory).generate(prompts(), sampling)) == expected, memory
    return policy, expected


@pytest.mark.short(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_hugging_faces_in_any_memory(family):
    check_greedy_answers(family)


def test_penalised_answers_equal_hugging_faces_in_any_memory_and_have_the_policys_own_log_probs():
    policy, expected = check_greedy_answers("llama", repetition_penalty=1.3)
    greedy = SamplingParams(max_new_tokens=20, temperature=0)
    assert expected != ids_of(BuiltinEngine(policy).generate(prompts(), greedy))
    sampling = replace(greedy, temperature=0.6, repetition_penalty=1.3, stop_token_ids=(3, 4), min_new_tokens=12, n=2)
    answers = BuiltinEngine(policy, **TIGHT).generate(prompts(), sampling)
    assert min(len(answer.ids) for answer in answers) >= 12
    check_log_probs(policy, answers, 0.6)


OTHERS = [*LATENT_FAMILIES, *CYCLIC_FAMILIES, *VARIANT_FAMILIES, *RECURRENT_FAMILIES, "bloom", "falcon"]


@pytest.mark.parametrize("family", OTHERS)
def test_other_layers_answer_in_conversations_as_hugging_faces_do(family):
    """Keys and values of different widths, sinks, chunks, layers that run more than once or have a state: read,
    continued and decoded. Two that the engine runs again for every token."""
    policy = policy_of(family)
    rollouts = converse(BuiltinEngine(policy, page_size=4), prompts((9, 17, 17, 4)))
    policy.inner.set_attn_implementation("eager")
    for rollout in rollouts:
        ids = torch.tensor(rollout.prompt_ids + rollout.ids)
        with torch.no_grad():
            log_probs = policy.inner(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        expected = log_probs.gather(1, ids[1:, None])[len(rollout.prompt_ids) - 1 :, 0]
        torch.testing.assert_close(torch.from_numpy(rollout.log_probs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.short(13)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_log_probs_equal_the_trainers(family, temperature):
    policy = policy_of(family)
    answers = BuiltinEngine(policy, **TIGHT).generate(
        prompts(), SamplingParams(max_new_tokens=12, n=2, temperature=temperature)
    )
    check_log_probs(policy, answers, temperature)


def test_a_longrope_model_generates_up_to_its_limit():
    """Beyond it the keys that are cached would have to change."""
    policy = policy_of("phi3_longrope")
    engine = BuiltinEngine(policy, **TIGHT)
    assert engine.context == 12
    check_log_probs(policy, engine.generate(prompts((5, 7)), SamplingParams(max_new_tokens=5)))
    with pytest.raises(UserError, match="prompt 0 has 8 tokens and 5 may follow, but the model's context is 12"):
        engine.generate(prompts((8,)), SamplingParams(max_new_tokens=5))


def test_log_probs_at_temperature_one_come_besides_where_asked_for():
    policy = policy_of()
    sampling = SamplingParams(max_new_tokens=12, temperature=0.6, plain_log_probs=True)
    answers = BuiltinEngine(policy, **TIGHT).generate(prompts(), sampling)
    check_log_probs(policy, answers, 0.6)
    check_log_probs(policy, answers, name="plain_log_probs")
    assert BuiltinEngine(policy).generate(prompts(), SamplingParams(max_new_tokens=2))[0].plain_log_probs is None


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_after_being_stopped(monkeypatch):
    policy = policy_of()
    stopped = []
    stop = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, sample: (stopped.append(sample), stop(self, sample)))
    sampling = SamplingParams(max_new_tokens=24, n=2)
    crowd, seeds = prompts(np.random.default_rng(1).integers(1, 40, 32)), list(range(100, 132))
    together = ids_of(BuiltinEngine(policy, max_num_seqs=32).generate(crowd, sampling, seeds=seeds))
    for memory in (TIGHT, {"max_num_seqs": 25, "kv_tokens": 1000, "page_size": 5}):
        assert ids_of(BuiltinEngine(policy, **memory).generate(crowd, sampling, seeds=seeds)) == together
    assert stopped
    for index in (0, 17, 31):
        alone = BuiltinEngine(policy).generate([crowd[index]], sampling, seeds=[seeds[index]])
        assert ids_of(alone) == together[2 * index : 2 * index + 2]
    assert ids_of(BuiltinEngine(policy).generate([crowd[0]], sampling, seeds=[999])) != together[:2]


@pytest.mark.parametrize("count", [4000, pytest.param(200_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "setting", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 8, "top_p": 0.8, "temperature": 1.5}]
)
def test_frequencies_of_many_samples_match_the_models_distribution(setting, count):
    """Chi-square on the first token of many samples, against the distribution worked out apart."""
    policy = policy_of(vocab_size=13, spread=0.5)
    ids = [3, 7, 5]
    engine = BuiltinEngine(policy, max_num_seqs=count, page_size=4)
    answers = engine.generate([ids], SamplingParams(max_new_tokens=1, n=count, seed=5, **setting))
    policy.inner.set_attn_implementation("eager")
    logits = policy.inner(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double()
    shares = torch.softmax(logits / setting.get("temperature", 1.0), -1).detach().numpy()
    order = np.argsort(-shares)
    if "top_k" in setting:
        shares = renormalised(shares, order[: setting["top_k"]])
    if "top_p" in setting:
        before = np.cumsum(shares[order]) - shares[order]
        shares = renormalised(shares, order[before < setting["top_p"]])
    assert_frequencies(np.bincount([a.ids[0] for a in answers], minlength=13), shares)


def test_stop_tokens_end_an_answer_but_not_before_the_minimum():
    policy = policy_of()
    stops = tuple(range(3, 30))
    answers = BuiltinEngine(policy).generate(prompts(), SamplingParams(max_new_tokens=30, n=4, stop_token_ids=stops))
    assert all(a.finish == "stop" and a.ids[-1] in stops and not set(a.ids[:-1]) & set(stops) for a in answers)
    late = SamplingParams(max_new_tokens=30, n=4, stop_token_ids=stops, min_new_tokens=6)
    answers = BuiltinEngine(policy).generate(prompts(), late)
    assert all(len(a.ids) >= 7 and not set(a.ids[:6]) & set(stops) for a in answers)


def test_stop_strings_end_an_answer_and_one_that_never_comes_runs_to_its_length():
    tokenizer = make_tokenizer()
    engine, given = BuiltinEngine(policy_of(vocab_size=len(tokenizer)), tokenizer), prompts((4, 9), vocabulary=40)
    answers = engine.generate(given, SamplingParams(max_new_tokens=60, n=8, stop_strings=("a", "7")))
    assert {a.finish for a in answers} == {"stop"}
    for answer in answers:
        whole, shorter = tokenizer.decode(answer.ids), tokenizer.decode(answer.ids[:-1])
        assert {"a", "7"} & set(whole) and not {"a", "7"} & set(shorter)
    never = engine.generate(given[:1], SamplingParams(max_new_tokens=5, stop_strings=("never ever",)))
    assert never[0].finish == "length" and len(never[0].ids) == 5


def test_forbidden_and_favoured_tokens():
    policy = policy_of()
    forbidden = tuple(range(10, 60))
    answers = BuiltinEngine(policy).generate(prompts(), SamplingParams(max_new_tokens=10, forbidden_tokens=forbidden))
    assert not {t for a in answers for t in a.ids} & set(forbidden)
    favoured = BuiltinEngine(policy).generate(prompts(), SamplingParams(max_new_tokens=10, logit_bias={7: 1e4}))
    assert {t for a in favoured for t in a.ids} == {7}


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_a_sequence_that_fills_the_context_ends_beside_longer_answers(family):
    policy = policy_of(family)
    answers = BuiltinEngine(policy).generate(prompts((251, 3)), SamplingParams(), limits=[5, 30])
    assert [len(answer.ids) for answer in answers] == [5, 30]
    check_log_probs(policy, answers)


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_training_goes_on_as_before_after_generating(family):
    policy = policy_of(family).train()
    batch = TokenBatch.of(random_examples([9, 5]))
    expected = policy(batch).log_probs_N
    BuiltinEngine(policy).generate(prompts(), SamplingParams(max_new_tokens=3))
    assert policy.training and torch.is_grad_enabled()
    torch.testing.assert_close(policy(batch).log_probs_N, expected)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_many_requests_pass_through_memory_for_eight(count):
    lengths = np.random.default_rng(2).integers(4, 12, count)
    engine = BuiltinEngine(policy_of(), max_num_seqs=16, kv_tokens=8 * 24, page_size=4)
    answers = engine.generate(prompts(lengths), SamplingParams(max_new_tokens=12))
    assert [a.prompt for a in answers] == list(range(count)) and all(len(a.ids) == 12 for a in answers)


def test_sleep_gives_the_memory_back_and_the_next_call_works():
    engine = BuiltinEngine(policy_of())
    sampling = SamplingParams(max_new_tokens=4, temperature=0)
    before = engine.generate(prompts(), sampling)
    memory = weakref.ref(engine.memory.cache(1, 1, torch.device("cpu")).tensors[0])
    assert memory() is not None
    engine.sleep()
    assert memory() is None
    assert ids_of(engine.generate(prompts(), sampling)) == ids_of(before)


def test_mistakes_are_told_in_one_line():
    policy = policy_of()
    with pytest.raises(UserError, match=r"prompt 1 has 250 tokens .* context is 256"):
        BuiltinEngine(policy).generate([[3], [3] * 250], SamplingParams(max_new_tokens=10))
    with pytest.raises(UserError, match="prompt 0 is empty"):
        BuiltinEngine(policy).generate([[]], SamplingParams())
    with pytest.raises(UserError, match="n is 0"):
        SamplingParams(n=0)
    with pytest.raises(UserError, match="cannot hold one sequence"):
        BuiltinEngine(policy, kv_tokens=16).generate([[3] * 40], SamplingParams())
    with torch.no_grad():
        policy.head.weight[5] = float("nan")
    with pytest.raises(UserError, match="not finite for prompt 0, sample 0, token 0"):
        BuiltinEngine(policy).generate(prompts(), SamplingParams())
