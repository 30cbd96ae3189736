import re

import pytest

from tests.config.every_job import refusal
from trimtab.config.resolved_config import check, settle
from trimtab.config.rl_jobs import TailOptions
from trimtab.config.rl_options import GPT2_BAD_TOKENS, METHODS

GIVEN = {"pretrain": "owner/model", "prompt_data": "owner/prompts", "reward_pretrain": "owner/judge"}


def settled(**changes) -> tuple[TailOptions, list[str]]:
    options, warnings = settle(TailOptions(**GIVEN | changes))
    return options, warnings + check(options)


@pytest.mark.parametrize("method", METHODS)
def test_defaults_pass_without_a_word_for_every_method(method):
    options, warnings = settled(method=method)
    assert warnings == []
    assert options.advantage_estimator == ("gae" if method == "ppo" else "rloo")
    assert options.critic_pretrain == ("owner/model" if method == "ppo" else None)
    again, _ = settle(options)
    assert again == options


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"method": "dpo"}, "--method is dpo: it must be ppo, "),
        ({"target_dist_beta": 10.0}, "--target_dist_beta 10: with --method repulse it must be below 0"),
        ({"target_dist_beta": 0.0, "method": "base_proposal"}, "with --method base_proposal it must be below 0"),
        ({"target_dist_beta": 1.0, "method": "reinforce_transform"}, "reinforce_transform it must be below 0"),
        ({"n_samples_per_prompt": 1}, "--n_samples_per_prompt 1: --method repulse weighs answers"),
        ({"n_samples_per_prompt": 1, "method": "reinforce"}, "--n_samples_per_prompt 1: --method reinforce"),
        ({"micro_train_batch_size": 2}, "--micro_train_batch_size 2 splits the 5 answers to a prompt"),
        ({"train_batch_size": 500}, "--train_batch_size 500: .* one step of each rollout, .* = 250"),
        ({"reward_pretrain": None}, "nothing gives rewards"),
        ({"alpha": -0.1}, "--alpha is -0.1"),
        ({"start_alpha": 0.0}, "--start_alpha is 0"),
        ({"start_alpha": 0.1, "alpha": 0.0}, "--start_alpha: no factor leads from it to --alpha 0"),
        ({"start_target_dist_beta": 1.0}, "--start_target_dist_beta 1: it must be below 0"),
        ({"push_down_scale": "none"}, "--push_down_scale is none"),
        ({"token_reduction": "mean"}, "--token_reduction is mean"),
        ({"reward_transform": "log"}, "--reward_transform is log"),
        ({"method": "reinforce_transform", "reward_transform": "minus_alpha_ind"}, "needs --bad_threshold"),
        ({"reinforce_baseline_type": "critic"}, "--reinforce_baseline_type is critic"),
        ({"proposal": "head"}, "--proposal is head"),
        ({"proposal_loss": "sixo"}, "--proposal_loss is sixo"),
        (
            {"proposal": "modulation_nn_head", "proposal_loss": "ctl_nosecondterm"},
            "--proposal modulation_nn_head grows without bound",
        ),
        ({"proposal": "modulation_linear_head", "proposal_lora_rank": 4}, "takes no adapters"),
        ({"proposal_learning_rate": -1.0}, "--proposal_learning_rate is -1"),
        ({"proposal_updates": 0}, "--proposal_updates is 0"),
        (
            {"proposal_updates": 2, "method": "base_proposal"},
            "--proposal_updates: --method base_proposal has no proposal",
        ),
        ({"proposal_lora_rank": 2, "method": "reinforce"}, "--proposal_lora_rank: --method reinforce has no proposal"),
        ({"temperature": 0.7}, "--temperature has no place in --method repulse"),
        ({"nproc": 2, "ds_tensor_parallel_size": 2}, "--ds_tensor_parallel_size: tail methods split no layers and no"),
        (
            {"nproc": 2, "ring_attn_size": 2},
            "--ring_attn_size: tail methods split no layers and no rows yet; leave it at 1",
        ),
        ({"top_p": 0.9, "method": "reinforce"}, "--top_p has no place in --method reinforce"),
        ({"generate_min_len": 4}, "--generate_min_len has no place in --method repulse"),
        ({"repetition_penalty": 1.1}, "--repetition_penalty has no place in --method repulse"),
        ({"running_reward_norm": True, "method": "reinforce"}, "--running_reward_norm has no place in --method reinf"),
        ({"max_epochs": 2}, "--max_epochs has no place"),
        ({"kl_target": 1.0}, "--kl_target has no place"),
        ({"advantage_estimator": "group_norm"}, "--advantage_estimator group_norm: --method decides that here"),
        ({"fit_steps": 0}, "--fit_steps is 0"),
        ({"fit_steps": 2}, "--fit_steps measures with --analytic_bad_word_calc"),
        ({"analytic_bad_word_calc": True}, "give it as --single_prompt"),
        ({"evaluate_heldout_sampling": True}, "needs --heldout_prompt_data"),
        (
            {"evaluate_heldout_sampling": True, "heldout_prompt_data": "./absent.jsonl"},
            "--heldout_prompt_data: ./absent.jsonl does not exist",
        ),
        ({"sampling_iters": 0}, "--sampling_iters is 0"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(changes, complaint):
    assert re.search(complaint, refusal(settled, **changes))


@pytest.mark.parametrize(
    "changes, warning",
    [
        ({"alpha": 0.0}, "--alpha 0 makes --method repulse the same as reinforce"),
        ({"reinforce_hardcoded_baseline": 1.0}, "--reinforce_hardcoded_baseline has no effect"),
        ({"bad_token_ids": (3,)}, "--bad_token_ids has no effect without --analytic_bad_word_calc"),
        ({"heldout_prompt_data": "a/b"}, "--heldout_prompt_data has no effect without --evaluate_heldout_sampling"),
        ({"save_negdata_threshold": -7.0}, "--save_negdata_threshold has no effect without --save_negdata"),
        ({"method": "reinforce", "push_down_scale": "per_group"}, "--push_down_scale has no effect with --method rein"),
        ({"method": "reinforce", "start_alpha": 0.5}, "--start_alpha has no effect with --method reinforce"),
        ({"reward_transform": "minus_alpha_ind"}, "--reward_transform has no effect with --method repulse"),
        ({"method": "ppo", "alpha": 0.5}, "--alpha has no effect with --method ppo"),
        ({"method": "ppo", "proposal_learning_rate": 1.0}, "--proposal_learning_rate has no effect with --method ppo"),
    ],
)
def test_what_has_no_effect_is_said(changes, warning):
    _, (found,) = settled(**changes)
    assert found.startswith(warning)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "reinforce", "target_dist_beta": 0.0, "alpha": 0.0},
        {"method": "ppo", "n_samples_per_prompt": 1, "train_batch_size": 50, "micro_train_batch_size": 50},
        {"micro_train_batch_size": 2, "packing_samples": True},
        {"method": "reinforce_transform", "reward_transform": "minus_alpha_ind", "bad_threshold": -5.0,
         "target_dist_beta": 1.0},
        {"analytic_bad_word_calc": True, "single_prompt": "once", "fit_steps": 3, "bad_token_ids": (1, 2)},
    ],
)  # fmt: skip
def test_what_may_be_meant_passes(changes):
    assert settled(**changes)[1] == []


def test_the_bad_tokens_are_19():
    assert len(set(GPT2_BAD_TOKENS)) == 19 and max(GPT2_BAD_TOKENS) < 50_257


def test_ppo_counts_answers_alike_unless_told_otherwise():
    assert settled(method="ppo")[0].loss_reduction == "answer"
    assert settled(method="ppo", loss_reduction="token")[0].loss_reduction == "token"
    assert settled(method="reinforce")[0].loss_reduction is None


def test_bad_texts_are_those_below_the_threshold_of_bad_answers_unless_told_otherwise():
    for given, threshold in (
        ({}, -5.0),
        ({"bad_threshold": 0.5}, 0.5),
        ({"bad_threshold": 0.5, "save_negdata_threshold": -1.0}, -1.0),
    ):
        assert settled(save_negdata=True, **given)[0].save_negdata_threshold == threshold
