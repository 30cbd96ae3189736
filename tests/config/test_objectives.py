import dataclasses

import pytest

from tests.config import every_job
from trimtab.config.jobs import DPOOptions, KDOptions, KTOOptions, LoraCombineOptions, PRMOptions, RMOptions
from trimtab.config.resolved_config import check, settle

NEEDED = {
    KDOptions: {"teacher_model": "owner/teacher"},
    PRMOptions: {"placeholder_token": "ки"},
}


def options(job_class, **changes):
    return job_class(**{"pretrain": "owner/model", "dataset": "owner/data", **NEEDED.get(job_class, {}), **changes})


def refusal(job_class, **changes) -> str:
    return every_job.refusal(check, options(job_class, **changes))


@pytest.mark.parametrize("job_class", [RMOptions, PRMOptions, DPOOptions, KTOOptions, KDOptions])
def test_plain_options_pass_without_a_word(job_class):
    assert check(options(job_class)) == []


@pytest.mark.parametrize(
    "job_class, changes, expected",
    [
        (KTOOptions, {"pretrain": None}, "--pretrain is missing"),
        (
            PRMOptions,
            {"placeholder_token": None},
            "--placeholder_token is missing: give the token that",
        ),
        (PRMOptions, {"placeholder_token": None, "reward_tokens": ("+", "-")}, "--placeholder_token is missing"),
        (PRMOptions, {"reward_tokens": ("+",)}, "--reward_tokens +: give two or more different tokens, best first"),
        (PRMOptions, {"reward_tokens": ("+", "+")}, "different"),
        (RMOptions, {"loss": "hinge"}, "--loss is hinge: it must be sigmoid or logexp"),
        (RMOptions, {"value_head_prefix": "a.b"}, "--value_head_prefix is 'a.b': it must be a name such as score"),
        (RMOptions, {"value_head_prefix": ""}, "--value_head_prefix is ''"),
        (DPOOptions, {"beta": 0.0}, "--beta is 0: it must be above 0"),
        (
            DPOOptions,
            {"preference_loss": "kto"},
            "it must be dpo, ipo, ipo_mean, orpo or simpo",
        ),
        (DPOOptions, {"label_smoothing": 0.5}, "--label_smoothing is 0.5: it must be at least 0 and below 0.5"),
        (DPOOptions, {"label_smoothing": -0.1}, "--label_smoothing"),
        (DPOOptions, {"nll_loss_coef": -1.0}, "--nll_loss_coef"),
        (DPOOptions, {"simpo_gamma": -1.0, "preference_loss": "simpo"}, "--simpo_gamma"),
        (
            DPOOptions,
            {"ipo": True, "preference_loss": "simpo"},
            "--ipo and --preference_loss simpo are two losses: choose one",
        ),
        (DPOOptions, {"ipo": True, "label_smoothing": 0.1}, "--label_smoothing belongs to the dpo loss, not to ipo"),
        (DPOOptions, {"ref_pretrain": "./nowhere"}, "--ref_pretrain: ./nowhere does not exist; check the path"),
        (KTOOptions, {"ref_pretrain": "./nowhere"}, "--ref_pretrain: ./nowhere does not exist; check the path"),
        (KTOOptions, {"beta": -0.1}, "--beta"),
        (KTOOptions, {"desirable_loss_weight": -1.0}, "--desirable_loss_weight"),
        (KTOOptions, {"desirable_loss_weight": 0.0, "undesirable_loss_weight": 0.0}, "nothing to learn"),
        (KDOptions, {"teacher_model": None}, "--teacher_model is missing: give a hub name or a model folder"),
        (KDOptions, {"teacher_model": "/no/such"}, "--teacher_model: /no/such does not exist; check the path"),
        (KDOptions, {"kd_coef": 1.1}, "--kd_coef is 1.1: it must be between 0 and 1"),
        (KDOptions, {"kd_loss": "kl"}, "--kd_loss is kl: it must be forward_kl, reverse_kl or jsd"),
        (KDOptions, {"jsd_beta": 1.0}, "--jsd_beta is 1"),
        (KDOptions, {"multiturn": True, "pretrain_mode": True}, "choose one"),
    ],
)
def test_what_cannot_be_meant_is_refused(job_class, changes, expected):
    assert expected in refusal(job_class, **changes)


@pytest.mark.parametrize("loss", ["ipo", "orpo", "simpo"])
def test_label_smoothing_belongs_to_dpo_alone(loss):
    assert f"not to {loss}" in refusal(DPOOptions, preference_loss=loss, label_smoothing=0.1)
    assert check(options(DPOOptions, label_smoothing=0.1)) == []


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
@pytest.mark.parametrize(
    "changes", [{"ref_pretrain": "owner/reference"}, {"ref_offload": True}, {"precompute_ref_log_probs": True}]
)
def test_a_loss_without_reference_refuses_what_is_about_one(loss, changes):
    line = refusal(DPOOptions, preference_loss=loss, **changes)
    assert line == f"--preference_loss {loss} has no reference: drop --{next(iter(changes))}"
    assert check(options(DPOOptions, **changes)) == []


def test_the_two_spellings_of_ipo_agree_after_settling():
    for changes in ({"ipo": True}, {"preference_loss": "ipo"}, {"ipo": True, "preference_loss": "ipo"}):
        settled, warnings = settle(options(DPOOptions, **changes))
        assert (settled.ipo, settled.preference_loss, warnings) == (True, "ipo", [])
        assert settle(settled)[0] == settled and check(settled) == []
    settled, _ = settle(options(DPOOptions, preference_loss="simpo"))
    assert (settled.ipo, settled.preference_loss) == (False, "simpo")


@pytest.mark.parametrize(
    "job_class, changes, expected",
    [
        (DPOOptions, {"simpo_gamma": 1.0}, "--simpo_gamma has no effect without --preference_loss simpo"),
        (DPOOptions, {"ref_offload": True, "lora_rank": 8}, "--ref_offload has no effect: with --lora_rank"),
        (KTOOptions, {"ref_offload": True, "lora_rank": 8}, "--ref_offload has no effect: with --lora_rank"),
        (KDOptions, {"jsd_beta": 0.3}, "--jsd_beta has no effect without --kd_loss jsd"),
        (KDOptions, {"kd_coef": 0.0}, "--teacher_model has no effect with --kd_coef 0"),
    ],
)
def test_an_option_without_effect_is_a_warning(job_class, changes, expected):
    (warning,) = check(options(job_class, **changes))
    assert warning.startswith(expected)


def test_options_of_the_chosen_loss_pass_without_a_word():
    assert check(options(DPOOptions, preference_loss="simpo", simpo_gamma=1.0, beta=2.0)) == []
    assert check(options(KDOptions, kd_loss="jsd", jsd_beta=0.3)) == []
    assert check(options(PRMOptions, reward_tokens=("+", "-"))) == []


@pytest.mark.parametrize("job_class, least", [(RMOptions, 1024), (DPOOptions, 1024), (KTOOptions, 512)])
def test_a_token_budget_must_hold_a_whole_pair(job_class, least):
    chosen = options(job_class, max_len=512, packing_samples=True, train_max_tokens_per_gpu=least)
    assert check(chosen) == []
    small = dataclasses.replace(chosen, train_max_tokens_per_gpu=least - 1)
    assert f"raise it to {least} or more" in every_job.refusal(check, small)
    # The budget is that of each process that shares a row.
    shared = dataclasses.replace(chosen, ring_attn_size=4, train_max_tokens_per_gpu=least // 4)
    assert check(shared) == []
    small = dataclasses.replace(shared, train_max_tokens_per_gpu=least // 4 - 1)
    assert f"raise it to {least // 4} or more" in every_job.refusal(check, small)


@pytest.fixture
def merge(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    return LoraCombineOptions(model_path="./base", lora_path="./adapter", output_path="./merged")


def test_a_merge_into_a_new_folder_passes_and_into_a_used_one_is_a_warning(merge, tmp_path):
    assert check(merge) == []
    (tmp_path / "merged").mkdir()
    assert check(merge) == []
    (tmp_path / "merged" / "config.json").write_text("{}")
    (warning,) = check(merge)
    assert "not empty" in warning


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"model_path": None}, "--model_path is missing"),
        ({"lora_path": None}, "--lora_path is missing"),
        ({"output_path": None}, "--output_path is missing"),
        ({"model_path": "./nowhere"}, "--model_path: ./nowhere does not exist"),
        ({"lora_path": "./nowhere"}, "--lora_path: ./nowhere does not exist"),
        ({"lora_path": "./base"}, "no adapter_config.json there"),
        ({"output_path": "base/"}, "--output_path is --model_path, which the merged model would replace"),
        ({"output_path": "merged/../adapter"}, "--output_path is --lora_path, which the merged model would replace"),
        ({"output_path": "adapter/adapter_config.json"}, "is a file: give a folder"),
    ],
)
def test_a_merge_that_cannot_work_or_would_lose_something_is_refused(merge, changes, expected):
    assert expected in every_job.refusal(check, dataclasses.replace(merge, **changes))
