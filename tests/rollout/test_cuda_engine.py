"""Recorded decoding and fused layers: the same answers as step by step through the model's own modules.

On an accelerator as they are; without one, where Triton is installed, its interpreter runs the kernels and a recording
is replayed by doing the work again.
"""

import numpy as np
import pytest
import torch

from tests.rollout.answers import (
    DoneAgain,
    check_log_probs,
    fill_adapters,
    ids_of,
    sampled_log_probs,
    trained_log_probs,
)
from tests.rollout.kernel_device import DEVICE, DTYPE
from tests.rollout.test_builtin_engine import prompts
from tests.rollout.test_partial_rollouts import assert_same, changed, check_under_new_weights, interrupted, trained
from tests.tiny import tiny_model
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin import attention, cuda_graphs, fused_layers, linear, model_runner, sampler
from trimtab.rollout.builtin.cuda_graphs import RUNS_BEFORE_CAPTURE
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.builtin.kernels import int8_linear as int8_kernels
from trimtab.rollout.builtin.kernels import lora_linear as adapted_kernels
from trimtab.rollout.builtin.kernels import paged_attention as kernels
from trimtab.rollout.builtin.kv_cache import KVCache
from trimtab.rollout.builtin.model_runner import ModelRunner
from trimtab.rollout.sampling import SamplingParams

# Minutes in the interpreter.
pytestmark = pytest.mark.long if DEVICE == "cpu" else []

TIGHT = {"kv_tokens": 160 if DEVICE == "cuda" else 40, "max_num_seqs": 3, "page_size": 8}
# The interpreter takes a second for a step.
SHORT, NEW = (prompts((5, 17, 33, 1)), 20) if DEVICE == "cuda" else (prompts((3, 9)), 6)
OUTLIVES = pytest.mark.skipif(DEVICE == "cpu", reason="what is done again is done with the session it was made in")
USERS_OF_KERNELS = (attention, linear, model_runner, sampler)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    if DEVICE == "cpu":
        use_kernels(monkeypatch, True)
        monkeypatch.setattr(cuda_graphs, "capture_graph", DoneAgain)
        monkeypatch.setattr(kernels, "PROGRAMS_TO_FILL_A_DEVICE", 1)


def use_kernels(monkeypatch, use: bool) -> None:
    for module in USERS_OF_KERNELS:
        monkeypatch.setattr(module, "has_kernels", lambda device: use)
    monkeypatch.setattr(cuda_graphs, "has_graphs", lambda device: use)


def policy_of(family="llama", dtype=torch.float32, **changes):
    policy = Policy(tiny_model(family, **changes).to(DEVICE))
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    choose_path(policy)
    return policy


def answers(policy, sampling, given=SHORT, **memory):
    return ids_of(BuiltinEngine(policy, **memory).generate(given, sampling))


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2", "qwen3", "mistral"])
def test_llama_like_models_are_recognised(family):
    assert BuiltinEngine(policy_of(family)).fused is not None


@pytest.mark.parametrize(
    "family, changes",
    [("granite", {"residual_multiplier": 0.5}), ("llama", {"hidden_act": "gelu"}), ("gpt2", {}), ("gemma2", {})],
)
def test_others_keep_their_own_layers(family, changes):
    assert BuiltinEngine(policy_of(family, **changes)).fused is None


@pytest.mark.parametrize(
    "rows, lines", [(0, ["not fused"]), (9, ["no longer fused"]), (12, ["graph", "no longer fused"])]
)
def test_kernels_that_do_not_fit_leave_the_work_to_the_modules(rows, lines, monkeypatch, caplog):
    """In the trial; in reading 12 tokens; in decoding 14 at once."""
    from triton.runtime.errors import OutOfResources

    def gate_up(mlp, x):
        if len(x) > rows:
            raise OutOfResources(245_848, 232_448, "shared memory")
        return within(mlp, x)

    within = fused_layers.gate_up
    monkeypatch.setattr(fused_layers, "gate_up", gate_up)
    policy, sampling, given = policy_of(), SamplingParams(max_new_tokens=3, n=7), prompts((3, 9))
    found = answers(policy, sampling, given)
    said = [message for message in caplog.messages if "shared memory" in message]
    assert len(said) == len(lines) and all(line in message for line, message in zip(lines, said))
    use_kernels(monkeypatch, False)
    assert answers(policy, sampling, given) == found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "mixtral"])
@pytest.mark.parametrize("memory", [{}, TIGHT])
def test_recorded_decoding_gives_the_tokens_of_step_by_step(family, memory, monkeypatch):
    policy = policy_of(family)
    settings = [
        SamplingParams(max_new_tokens=NEW, temperature=0),
        SamplingParams(max_new_tokens=NEW, n=2, temperature=0.8),
    ]
    recorded = [answers(policy, sampling, **memory) for sampling in settings]
    use_kernels(monkeypatch, False)
    assert recorded == [answers(policy, sampling) for sampling in settings]


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"stop_token_ids": tuple(range(3, 30))},
        {"stop_token_ids": tuple(range(3, 50)), "min_new_tokens": 4},
        {"forbidden_tokens": tuple(range(10, 60))},
        {"repetition_penalty": 1.3},
    ],
)
def test_every_setting_gives_the_tokens_of_step_by_step(changes, monkeypatch):
    policy, sampling = policy_of(), SamplingParams(max_new_tokens=NEW, n=2, **changes)
    recorded = answers(policy, sampling)
    use_kernels(monkeypatch, False)
    assert recorded == answers(policy, sampling)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("late", [{}, {"stop_token_ids": tuple(range(3, 50)), "min_new_tokens": 4}])
def test_log_probs_equal_the_trainers(temperature, late):
    policy = policy_of()
    sampling = SamplingParams(max_new_tokens=NEW, n=2, temperature=temperature, plain_log_probs=True, **late)
    given = BuiltinEngine(policy, **TIGHT).generate(SHORT, sampling)
    check_log_probs(policy, given, temperature)
    check_log_probs(policy, given, name="plain_log_probs")


@OUTLIVES
def test_recordings_follow_the_weights_and_survive_a_nap():
    policy = policy_of()
    used = BuiltinEngine(policy)
    sampling = SamplingParams(max_new_tokens=NEW, temperature=0)
    used.generate(SHORT, sampling)
    kept = used.captured.decodes
    others = [p.data for p in tiny_model("llama", seed=9).to(DEVICE).parameters()]
    fresh = answers(policy_of(seed=9), sampling)
    with torch.no_grad():
        for parameter, other in zip(policy.parameters(), others):
            parameter.copy_(other)
    assert ids_of(used.generate(SHORT, sampling)) == fresh and used.captured.decodes is kept
    for parameter, other in zip(policy.parameters(), others):
        parameter.data = other.clone()  # elsewhere now
    assert ids_of(used.generate(SHORT, sampling)) == fresh and used.captured.decodes is not kept
    used.sleep()
    assert used.captured.decodes is None
    assert ids_of(used.generate(SHORT, sampling)) == fresh


@OUTLIVES
@pytest.mark.parametrize("memory", [{}, TIGHT], ids=["plenty", "tight"])
@pytest.mark.parametrize("changes", [{}, {"stop_token_ids": tuple(range(3, 50)), "min_new_tokens": 9}, {"top_k": 5}])
def test_recorded_decoding_goes_on_from_drafts_as_if_nothing_had_been(changes, memory):
    policy, sampling = policy_of(), SamplingParams(max_new_tokens=NEW, n=2, temperature=0.9, **changes)
    given = {"given": SHORT, "seeds": list(range(len(SHORT)))}
    expected = BuiltinEngine(policy).generate(SHORT, sampling, seeds=given["seeds"])
    for steps in (1, 4):
        engine = BuiltinEngine(policy, **memory)
        assert_same(interrupted(engine, sampling, steps, **given), expected)
        assert engine.captured.decodes is not None


@OUTLIVES
@pytest.mark.parametrize("memory", [{}, TIGHT], ids=["plenty", "tight"])
def test_recorded_decoding_goes_on_under_new_weights(memory):
    policy, sampling = policy_of(), SamplingParams(max_new_tokens=NEW, n=2, temperature=0.9)
    engine, seeds = BuiltinEngine(policy, **memory), list(range(len(SHORT)))
    check_under_new_weights(engine, policy, sampling, 5, given=SHORT, seeds=seeds)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter knows no bf16")
def test_in_half_precision_what_follows_a_draft_is_drawn_from_the_policy_as_it_is():
    policy = policy_of(dtype=torch.bfloat16, spread=0.05)
    engine, versions = BuiltinEngine(policy), []
    seeds = list(range(len(SHORT)))

    def between():
        changed(policy, engine)
        versions.append([p.clone() for p in policy.parameters()])

    versions.append([p.clone() for p in policy.parameters()])
    sampling = SamplingParams(max_new_tokens=40, n=8)
    found = interrupted(engine, sampling, 9, between, given=SHORT, seeds=seeds)
    off = []
    for version, kept in enumerate(versions):
        with torch.no_grad():
            for parameter, values in zip(policy.parameters(), kept):
                parameter.copy_(values)
        own = [(r, r.versions == version) for r in found]
        off += [(trained(policy, r, 1.0) - r.log_probs)[mask] for r, mask in own]
    off = np.concatenate(off)
    assert len(off) == sum(len(r.ids) for r in found) and max(r.versions.max() for r in found) > 2
    assert np.abs(off).mean() < 5e-3 and abs(np.exp(off).mean() - 1) < 1e-3


def test_adapters_are_part_of_what_is_recorded(monkeypatch):
    pytest.importorskip("peft")
    from trimtab.config.training_options import LoraOptions
    from trimtab.models.lora import adapters_off, add_adapters

    policy = policy_of()
    sampling = SamplingParams(max_new_tokens=NEW, temperature=0)
    without = answers(policy, sampling)
    policy.model = add_adapters(
        policy.model, LoraOptions(lora_rank=4, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    )
    fill_adapters(policy, 0.5)
    used = BuiltinEngine(policy)
    assert used.fused is not None
    attached = ids_of(used.generate(SHORT, sampling))
    with adapters_off(policy.model):
        assert ids_of(used.generate(SHORT, sampling)) == without != attached
    use_kernels(monkeypatch, False)
    assert answers(policy, sampling) == attached


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj", "up_proj"]])
def test_kernels_with_adapters_sample_from_the_adapted_policy(targets, monkeypatch):
    pytest.importorskip("peft")
    from trimtab.config.training_options import LoraOptions
    from trimtab.models.lora import add_adapters

    monkeypatch.setattr(adapted_kernels, "DTYPES", (DTYPE,))
    policy = policy_of("llama", DTYPE, hidden_size=64, num_key_value_heads=4, spread=0.1)
    policy.model = add_adapters(policy.model, LoraOptions(lora_rank=4, lora_alpha=8, target_modules=targets))
    fill_adapters(policy, 0.2)
    multiplied = []
    height = adapted_kernels._height
    monkeypatch.setattr(adapted_kernels, "_height", lambda layers: multiplied.append(len(layers)) or height(layers))
    given = BuiltinEngine(policy).generate(SHORT, SamplingParams(max_new_tokens=NEW, n=2))
    assert {2, 3} <= set(multiplied)
    off = (sampled_log_probs(given) - trained_log_probs(policy, given)).abs()
    assert off.max() < 1e-4 if DEVICE == "cpu" else off.mean() < 5e-2


@pytest.mark.skipif(DEVICE == "cpu", reason="variable-length attention needs an accelerator")
def test_recorded_reading_leaves_what_reading_launch_by_launch_leaves():
    policy = policy_of(dtype=torch.bfloat16)
    given, sampling = prompts((5, 130, 33, 1, 64)), SamplingParams(max_new_tokens=1, n=3, temperature=0.9)
    used = BuiltinEngine(policy)
    before = [used.generate(given, sampling) for _ in range(RUNS_BEFORE_CAPTURE)]
    assert not used.captured.prefills.passes
    recorded = [used.generate(given, sampling) for _ in range(2)]
    assert len(used.captured.prefills.passes) == 1
    for found in (*before, *recorded):  # whether it was recorded changes no bit
        assert [a.ids for a in found] == [a.ids for a in before[0]]
        assert [a.log_probs.tobytes() for a in found] == [a.log_probs.tobytes() for a in before[0]]
    used.captured.follow = lambda cache, fused, state_rows: setattr(used.captured, "reads", None)
    plain = used.generate(given, sampling)
    assert [a.ids for a in before[0]] == [a.ids for a in plain]
    np.testing.assert_allclose([a.log_probs for a in before[0]], [a.log_probs for a in plain], atol=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="variable-length attention needs an accelerator")
def test_recorded_reading_on_leaves_what_reading_on_launch_by_launch_leaves():
    policy, found = policy_of(dtype=torch.bfloat16, spread=0.05), []
    used, sampling = BuiltinEngine(policy), SamplingParams(max_new_tokens=3, temperature=0.9)
    for _ in range(RUNS_BEFORE_CAPTURE + 2):
        with used.session(sampling) as session:
            for number, ids in enumerate(prompts((150, 140, 161, 133))):
                session.add(ids, seed=number)
            first = sorted(session, key=lambda rollout: rollout.prompt)
            for number, rollout in enumerate(first):
                session.add(rollout.prompt_ids + rollout.ids + [7, 8, 9, 10][: 1 + number], seed=9 + number)
            second = sorted(session, key=lambda rollout: rollout.prompt)
        found.append([(rollout.ids, rollout.log_probs.tobytes()) for rollout in (*first, *second)])
    assert all(one == found[0] for one in found)  # whether it was recorded changes no bit
    assert {bool(size.keys) for size in used.captured.prefills.passes} == {True, False}
    off = np.concatenate([trained(policy, rollout, 0.9) - rollout.log_probs for rollout in second])
    assert np.abs(off).mean() < 5e-3


@pytest.mark.skipif(DEVICE == "cpu", reason="variable-length attention needs an accelerator")
@pytest.mark.parametrize("most", [2**16, 130])
@pytest.mark.parametrize("family, kv_heads", [("llama", 2), ("llama", 1), ("mistral", 2), ("gpt2", None)])
def test_reading_on_in_one_row_equals_block_by_block(family, kv_heads, most, monkeypatch):
    """Also what lies in the cache; layers of their own (gpt2) and fused ones. Widths of 8, in half precision."""
    changes = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    policy = policy_of(family, torch.bfloat16, spread=0.05, **changes)
    monkeypatch.setattr(attention, "MOST_TOGETHER", most)
    texts, read = prompts((90, 7, 100, 1, 61, 90)), (80, 2, 99, 0, 15, 64)
    shape, arguments = ModelRunner.measure(policy)
    fused = model_runner.build_fused_layers(policy, shape, arguments, 16)
    hidden = []
    for applies in (attention.varlen_applies, lambda *_: False):
        monkeypatch.setattr(attention, "varlen_applies", applies)
        cache = KVCache(shape, 7 * len(texts), 16, torch.device(DEVICE))
        pages = [list(range(1 + 7 * number, 8 + 7 * number)) for number in range(len(texts))]
        with torch.no_grad(), ModelRunner(policy, cache, fused) as runner:
            runner.prefill([(text[:done], 0, own) for text, done, own in zip(texts, read, pages) if done])
            hidden.append(runner.prefill([*zip(texts, read, pages)]).float())
    assert (hidden[0] - hidden[1]).norm() / hidden[1].norm() < 1e-2


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter knows no bf16")
def test_log_probs_in_half_precision_are_the_trainers_but_for_rounding():
    policy = policy_of(dtype=torch.bfloat16, spread=0.05)
    given = BuiltinEngine(policy).generate(prompts(), SamplingParams(max_new_tokens=40, n=8))
    difference = trained_log_probs(policy, given) - sampled_log_probs(given)
    assert difference.abs().mean() < 5e-3 and abs(difference.exp().mean() - 1) < 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the second with biases
def test_int8_kernels_sample_from_the_policy_that_unpacking_gives(family, monkeypatch):
    monkeypatch.setattr(int8_kernels, "DTYPES", (DTYPE,))
    multiplied = []
    monkeypatch.setattr(int8_kernels, "_height", lambda rows: multiplied.append(rows) or 16)
    policy = policy_of(family, DTYPE, hidden_size=64, num_key_value_heads=4, spread=0.1)
    given = BuiltinEngine(policy, weight_only_int8=True).generate(SHORT, SamplingParams(max_new_tokens=NEW, n=2))
    assert len(multiplied) > NEW
    use_kernels(monkeypatch, False)
    with torch.no_grad(), linear.Int8Layers(policy):
        off = (sampled_log_probs(given) - trained_log_probs(policy, given)).abs()
    assert off.max() < 1e-4 if DEVICE == "cpu" else off.mean() < 5e-2


def test_a_model_that_cannot_be_recorded_decodes_step_by_step(monkeypatch):
    def refuse(work, pool):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    policy, sampling = policy_of(), SamplingParams(max_new_tokens=NEW, temperature=0)
    expected = answers(policy, sampling)
    monkeypatch.setattr(cuda_graphs, "capture_graph", refuse)
    used = BuiltinEngine(policy)
    assert ids_of(used.generate(SHORT, sampling)) == expected
    assert not used.captured.possible
    assert ids_of(used.generate(SHORT, sampling)) == expected and used.captured.decodes is None


def mixed(policy, settings, **memory):
    """Two are added while the first ones run, so that their company changes."""
    engine, found = BuiltinEngine(policy, **memory), []
    with engine.session(settings[0]) as session:
        for number, setting in enumerate(settings):
            session.add(SHORT[number % len(SHORT)], seed=number, sampling=setting)
            if number == 1:
                found += session.step(2)
        while session.has_unfinished:
            found += session.step(2)
    return [a.ids for a in sorted(found, key=lambda a: (a.prompt, a.sample))], engine


PLAIN = [SamplingParams(max_new_tokens=NEW, **s) for s in ({}, {"temperature": 0}, {"temperature": 0.4})]
ENDING = [
    SamplingParams(max_new_tokens=NEW - 1, stop_token_ids=tuple(range(9))),
    SamplingParams(max_new_tokens=NEW, stop_token_ids=tuple(range(3, 30)), min_new_tokens=3),
]
FILTERED = [
    SamplingParams(max_new_tokens=NEW, **s) for s in ({"top_k": 4}, {"top_p": 0.6, "temperature": 2}, {"min_p": 0.2})
]


@pytest.mark.parametrize("settings", [PLAIN, [*PLAIN, *ENDING], [*PLAIN[:2], *FILTERED, *ENDING]])
@pytest.mark.parametrize("fused", [True, False])
def test_rows_of_different_settings_are_recorded_and_draw_what_they_draw_alone(settings, fused, monkeypatch):
    policy = policy_of("llama" if fused else "gpt2")
    found, engine = mixed(policy, settings)
    (by_rows,) = engine.captured._by_rows.values()
    assert engine.captured.possible and by_rows[1].graphs
    alone = [
        BuiltinEngine(policy).generate([SHORT[number % len(SHORT)]], setting, seeds=[number])[0].ids
        for number, setting in enumerate(settings)
    ]
    assert found == alone
    use_kernels(monkeypatch, False)
    assert found == mixed(policy, settings)[0]


def test_what_cannot_be_recorded_goes_step_by_step_and_the_others_are_recorded_again():
    settings = [
        *PLAIN,
        SamplingParams(max_new_tokens=3, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=2, top_log_probs=2),
    ]
    policy = policy_of()
    found, engine = mixed(policy, settings)
    assert engine.captured.possible and [kind.is_plain for kind, _ in engine.captured._by_rows.values()] == [True]
    for number, setting in enumerate(settings):
        (expected,) = BuiltinEngine(policy).generate([SHORT[number % len(SHORT)]], setting, seeds=[number])
        assert found[number] == expected.ids


@pytest.mark.skipif(DEVICE == "cpu", reason="test_decode_table.py has it without an accelerator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_prepared_reads_and_draws_for_all_and_nothing_else_is_recorded(dtype, monkeypatch):
    policy, made = policy_of(dtype=dtype), []
    real = cuda_graphs.capture_graph
    monkeypatch.setattr(cuda_graphs, "capture_graph", lambda work, pool: made.append(work) or real(work, pool))
    settings, engine = SamplingParams(max_new_tokens=NEW), BuiltinEngine(policy, max_num_seqs=32)
    asked = prompts([5, 17, 33, 1] * 8, seed=3)
    expected = BuiltinEngine(policy, eager=True).generate(asked, settings, seeds=range(32))
    with engine.session(settings) as session:
        session.prepare(128)
        assert engine.captured.possible
        recorded = len(made)
        for number, ids in enumerate(asked):
            session.add(ids, seed=number)
            if number % 5 == 0:
                session.step(0)
        found = {rollout.prompt: rollout for rollout in session}
        reads = 15 if dtype == torch.bfloat16 else 0  # fp32 reads are launched one by one
        assert recorded > 5 + reads and len(made) == recorded
    if dtype == torch.float32:
        assert [found[number].ids for number in range(32)] == [rollout.ids for rollout in expected]
    for number in range(32):
        assert len(found[number].tokens) == NEW and np.isfinite(found[number].log_probs).all()
