"""Of every job: how a step is cut, packed or shared does not change what is learnt; what should move does."""

import numpy as np
import pytest
import torch
from tokenizers.normalizers import Replace

from tests.train.job_run import NoStop, relative_difference, step_gradient, write_rows
from tests.train.jobs import JOBS, run_of, write_job
from trimtab.data.batches import TokenBatch

EIGHT = "--train_batch_size 8 --micro_train_batch_size"
MOVING = "--learning_rate 1e-2 --lr_warmup_ratio 0"
COUNTS = ("loss", "samples", "trained_tokens", "accuracy", "kl", "chosen_reward", "rejected_reward", "nll", "distance")

SHARED = ("rm", "dpo", "ipo", "orpo", "simpo")
LORA = ("sft", "rm", "prm hard", "dpo", "dpo adapters off", "orpo", "kto", "kto adapters off", "kd")
JOBS_OF_LORA = {"dpo adapters off": "dpo", "kto adapters off": "kto"}


def assert_same_figures(first: dict, second: dict) -> None:
    for name in first.keys() & set(COUNTS):
        assert first[name] == pytest.approx(second[name], rel=1e-5, abs=1e-6), name


def step_batches(run) -> list[TokenBatch]:
    """The micro-batches of the first step."""
    return run.make_batches(run.task.cut(run.task.store, run.order.step_samples(0)))


CHANGED = [
    (f, extra) for f in ("llama", "gpt2", "mixtral") for extra in ("", "--lora_rank 4", "--gradient_checkpointing")
]


@pytest.mark.short(15)
@pytest.mark.parametrize(
    "name, family, extra",
    [*(("sft", *how) for how in CHANGED), *((name, "llama", "") for name in JOBS if name != "sft")],
)
def test_one_by_eight_two_by_four_and_eight_by_one_give_the_same_gradient(tmp_path, name, family, extra):
    write_job(tmp_path, name, family)
    whole, row = step_gradient(run_of(tmp_path, name, f"{EIGHT} 8 {extra}"))
    assert row["micro_batches"] == 1
    for size, count in ((2, 4), (1, 8)):
        cut, other = step_gradient(run_of(tmp_path, name, f"{EIGHT} {size} {extra}"))
        assert other["micro_batches"] == count
        assert relative_difference(whole, cut) < 1e-6
        assert_same_figures(row, other)


@pytest.mark.short(9)
@pytest.mark.parametrize("name, family", [("sft", "mistral"), ("sft", "gemma2"), *((name, "llama") for name in JOBS)])
def test_packed_padded_and_unpacked_give_the_same_gradient(tmp_path, name, family):
    write_job(tmp_path, name, family)
    unpacked, row = step_gradient(run_of(tmp_path, name, f"{EIGHT} 2"))
    packed, packed_row = step_gradient(run_of(tmp_path, name, f"{EIGHT} 2 --packing_samples"))
    padded, padded_row = step_gradient(run_of(tmp_path, name, f"{EIGHT} 4 --attn_implementation eager"))
    assert packed_row["micro_batches"] < row["micro_batches"], "packing fills rows"
    assert name != "sft" or packed_row["tokens"] == row["tokens"]
    assert relative_difference(unpacked, packed) < 1e-5
    assert relative_difference(unpacked, padded) < 1e-5
    assert_same_figures(row, packed_row)
    assert_same_figures(row, padded_row)


LESS_USUAL = [("dpo", "mistral"), ("rm", "mixtral"), ("prm soft", "gemma2"), ("kto", "mixtral"), ("kd", "gemma2")]
EVERY_OTHER = [
    (name, family)
    for name in ("rm", "prm soft", "dpo", "kto", "kd")
    for family in ("mistral", "gemma2", "mixtral")  # a window, a soft cap, experts
    if (name, family) not in LESS_USUAL
]


@pytest.mark.parametrize(
    "name, family", LESS_USUAL + [pytest.param(*both, marks=pytest.mark.long) for both in EVERY_OTHER]
)
def test_other_families_are_cut_and_packed_without_a_change(tmp_path, name, family):
    write_job(tmp_path, name, family)
    whole, _ = step_gradient(run_of(tmp_path, name, f"{EIGHT} 8"))
    single, _ = step_gradient(run_of(tmp_path, name, f"{EIGHT} 1"))
    packed, _ = step_gradient(run_of(tmp_path, name, f"{EIGHT} 2 --packing_samples"))
    assert relative_difference(whole, single) < 1e-6
    assert relative_difference(whole, packed) < 1e-5


def test_gradient_checkpointing_changes_nothing_and_bf16_only_its_rounding(tmp_path):
    write_job(tmp_path, "sft")
    plain, _ = step_gradient(run_of(tmp_path, "sft", f"{EIGHT} 4"))
    for extra in ("", "--gradient_checkpointing_use_reentrant"):
        saved, _ = step_gradient(run_of(tmp_path, "sft", f"{EIGHT} 4 --gradient_checkpointing {extra}"))
        assert relative_difference(plain, saved) < 1e-6
    half, _ = step_gradient(run_of(tmp_path, "sft", f"{EIGHT} 4 --bf16"))
    assert all(g.dtype == torch.float32 for g in half.values())
    assert 1e-6 < relative_difference(plain, half) < 0.05


def test_the_kl_of_kto_is_of_the_whole_step_and_counts(tmp_path):
    write_job(tmp_path, "kto")
    run = run_of(tmp_path, "kto", f"{EIGHT} 1")
    batches = step_batches(run)
    run.task.prepare(run.model, batches)
    values = {float(batch.extra["kl"]) for batch in batches}
    assert len(batches) == 8 and len(values) == 1 and values.pop() > 1, "one KL, and not the zero it is clamped at"


def test_in_kto_every_answer_of_the_step_meets_the_prompt_before_it(tmp_path):
    write_job(tmp_path, "kto")
    run = run_of(tmp_path, "kto", f"{EIGHT} 2")
    samples = run.order.step_samples(0)
    store, decode = run.task.store, run.tokenizer.decode
    seen = []
    for batch in step_batches(run):
        for i in range(len(batch.spans)):
            seen.append((decode(batch.sequence(i)), decode(batch.beside.sequence(i))))
    texts = {i: [decode(part) for part in np.split(store.example(i)[0], [store.answer_starts[i]])] for i in samples}
    expected = [
        ("".join(texts[i]), texts[i][0] + texts[following][1])
        for i, following in zip(samples, samples[1:] + samples[:1])
    ]
    assert sorted(seen) == sorted(expected)


def test_a_step_of_one_answer_has_no_mismatched_pair_and_no_kl(tmp_path):
    write_job(tmp_path, "kto", rows=1)
    _, row = step_gradient(run_of(tmp_path, "kto", f"{EIGHT} 1"))
    assert row["kl"] == 0 and row["samples"] == 1


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("words", ["", "--packing_samples"])
def test_prompts_shared_in_the_row_change_nothing_but_its_length(tmp_path, name, words):
    write_job(tmp_path, name)
    shared, row = step_gradient(run_of(tmp_path, name, f"{EIGHT} 4 {words}"))
    run = run_of(tmp_path, name, f"{EIGHT} 4 {words}")
    saved = int(run.task.store.shared[run.order.step_samples(0)].sum())
    object.__setattr__(run.task.store, "shared", np.zeros_like(run.task.store.shared))
    alone, other = step_gradient(run)
    assert saved > 0 and other["tokens"] == row["tokens"] + saved
    assert relative_difference(shared, alone) < 1e-5
    assert_same_figures(row, other)


def test_a_pair_takes_in_a_packed_row_what_it_needs_there(tmp_path):
    write_job(tmp_path, "dpo")
    run = run_of(tmp_path, "dpo", f"{EIGHT} 4 --packing_samples --train_max_tokens_per_gpu 80")
    batches = step_batches(run)
    assert all(batch.tokens <= 80 for batch in batches)
    assert len(batches) == -(-sum(batch.tokens for batch in batches) // 80), "no row is left half empty"


def test_reference_log_probs_computed_before_and_during_training_are_the_same(tmp_path):
    write_job(tmp_path, "dpo")
    live, row = step_gradient(run_of(tmp_path, "dpo", f"{EIGHT} 2"))
    run = run_of(tmp_path, "dpo precomputed", f"{EIGHT} 2")
    assert not run.task.scorers, "the model that made them is gone"
    stored, other = step_gradient(run)
    assert relative_difference(live, stored) < 1e-6
    assert_same_figures(row, other)


def test_judged_steps_may_be_certain_in_training_and_uncertain_in_evaluation(tmp_path):
    certain, uncertain = JOBS["prm hard"].make_rows(8, 1), JOBS["prm hard"].make_rows(8, 1)
    uncertain[0]["label"] = [{"y": 0.999999, "n": 0.000001}[label] for label in uncertain[0]["label"]]
    for train, evaluation in ((certain, uncertain), (uncertain, certain)):
        write_job(tmp_path, "prm hard")
        write_rows(tmp_path / "train.jsonl", train)
        write_rows(tmp_path / "test.jsonl", evaluation)
        run = run_of(tmp_path, "prm hard", f"{EIGHT} 2 --eval_dataset {tmp_path}/test.jsonl --eval_split train")
        assert run.task.store.soft != run.task.evaluation.soft
        figures = run.evaluate()
        _, row = step_gradient(run)
        assert figures["eval_loss"] == pytest.approx(row["loss"], rel=1e-4)
        assert figures["eval_accuracy"] == pytest.approx(row["accuracy"])


def test_reward_tokens_are_what_the_tokenizer_makes_of_them(tmp_path):
    write_job(tmp_path, "prm hard")
    run = run_of(tmp_path, "prm hard", f"{EIGHT} 2")
    run.tokenizer.backend_tokenizer.normalizer = Replace("y", "k")  # as some put a mark before every word
    assert run.task.choices(run.model) == run.tokenizer.convert_tokens_to_ids(["k", "n"])


# ---- what moves


MOVED = [("llama_tied", ""), ("mixtral", ""), ("qwen2_moe", ""), ("llama", "--bf16")]
MOVING_JOBS = ["sft", "rm", "prm hard", "dpo", "orpo", "kto", "kd"]
OF_SFT = [
    ("gemma2", ""),
    ("bloom", ""),
    *((f, "--bf16") for f in ("llama_tied", "mixtral", "qwen2_moe", "gemma2", "bloom")),
]


@pytest.mark.short(18)
@pytest.mark.parametrize(
    "name, family, extra",
    [
        *((name, "llama", "") for name in MOVING_JOBS),
        *(("sft", *how) for how in MOVED + OF_SFT),
        *((name, *how) for name in MOVING_JOBS[1:] for how in MOVED),
    ],
)
def test_every_parameter_moves_and_the_model_beside_does_not(tmp_path, name, family, extra):
    write_job(tmp_path, name, family, rows=64)
    more = "--aux_loss_coef 0.01" if family in ("mixtral", "qwen2_moe") else ""
    run = run_of(tmp_path, name, f"--train_batch_size 32 --micro_train_batch_size 8 {MOVING} {extra} {more}")
    frozen, moved = frozen_parameters(run), moved_since(run)
    frozen_before = [p.detach().clone() for p in frozen]
    row = run.train_step(NoStop())
    assert ("aux_loss" in row) == ("expert_max_load" in row) == bool(more)
    assert moved() == {n for n, _ in run.model.named_parameters()}
    assert (len(frozen) > 0) == (name in ("dpo", "kto", "kd"))
    assert all(torch.equal(p, old) and not p.requires_grad for p, old in zip(frozen, frozen_before))


def moved_since(run):
    """Names of the parameters that have changed from now on."""
    names = dict(run.model.named_parameters())
    before = {n: p.detach().clone() for n, p in names.items()}
    return lambda: {n for n, p in names.items() if not torch.equal(p, before[n])}


@pytest.mark.parametrize(("words", "rate"), [("--max_steps 1", 1e-2), ("--lr_warmup_ratio 1 --max_steps 2", 5e-3)])
def test_the_first_step_moves_the_model_with_and_without_warm_up(tmp_path, words, rate):
    write_job(tmp_path, "sft")
    run = run_of(tmp_path, "sft", f"{EIGHT} 4 --learning_rate 1e-2 {words}")
    moved = moved_since(run)
    assert run.train_step(NoStop())["learning_rate"] == pytest.approx(rate)
    assert moved() == {n for n, _ in run.model.named_parameters()}


def frozen_parameters(run) -> list[torch.Tensor]:
    """Of the reference or the teacher, if the job has one of its own."""
    models = [scorer.model for scorer in run.task.scorers.values() if scorer.model is not run.model]
    return [parameter for model in models for parameter in model.parameters()]


def lora_run(folder, name: str, words: str = ""):
    job = JOBS_OF_LORA.get(name, name)
    write_job(folder, job)
    run = run_of(
        folder, job, f"{EIGHT} 4 --lora_rank 4 {MOVING} {words} {'--ref_pretrain None' if job != name else ''}"
    )
    if job != name:
        assert run.task.scorers["reference"].model is run.model, "no second copy"
    return run


@pytest.mark.parametrize("name", LORA)
def test_with_lora_adapters_move_and_nothing_else_but_a_reward_head(tmp_path, name):
    run = lora_run(tmp_path, name)
    names, moved = {n for n, _ in run.model.named_parameters()}, moved_since(run)
    frozen = frozen_parameters(run)
    frozen_before = [p.detach().clone() for p in frozen]
    head = {n for n in names if "modules_to_save" in n and "score" in n}
    assert len(head) == (name == "rm")
    run.train_step(NoStop())
    assert moved() == {n for n in names if "lora_B" in n} | head, "A has no gradient while B is zero"
    run.train_step(NoStop())
    assert moved() == {n for n in names if "lora_" in n} | head
    assert all(torch.equal(p, old) for p, old in zip(frozen, frozen_before))


@pytest.mark.parametrize("name", ["dpo adapters off", "kto adapters off"])
def test_the_reference_without_adapters_stays_the_model_that_training_began_with(tmp_path, name):
    run = lora_run(tmp_path, name)
    batches = step_batches(run)

    def scored():
        run.task.prepare(run.model, batches)
        return torch.cat([batch.extra["reference_S"] for batch in batches])

    before = scored()
    rows = [run.train_step(NoStop()) for _ in range(2)]
    assert torch.equal(before, scored())
    assert rows[0]["chosen_reward"] == 0 and rows[1]["chosen_reward"] != 0, "the policy left it"


def test_an_adapter_on_the_lm_head_is_part_of_a_judgement(tmp_path):
    run = lora_run(tmp_path, "prm hard", "--target_modules lm_head")
    rows = [run.train_step(NoStop()) for _ in range(2)]
    batch = step_batches(run)[0]
    with_adapter = run.task.loss(run.model, batch, run.task.totals([batch])).loss
    with run.model.model.disable_adapter():
        without = run.task.loss(run.model, batch, run.task.totals([batch])).loss
    assert rows[0]["grad_norm"] > 0 and not torch.isclose(with_adapter, without)
