"""Bad input of a tail run: one clear line each, before anything is trained."""

import pytest

from tests.train.tail.tail_run import arguments
from trimtab.cli.main import main

WORDS = "--analytic_bad_word_calc --single_prompt hello"
MISTAKES = [
    ("--target_dist_beta 2", "--target_dist_beta 2: with --method repulse it must be below 0"),
    ("--n_samples_per_prompt 1", "--n_samples_per_prompt 1: --method repulse weighs answers"),
    ("--micro_train_batch_size 2", "--micro_train_batch_size 2 splits the 4 answers to a prompt"),
    ("--train_batch_size 8", "--train_batch_size 8: --method repulse makes one step of each rollout"),
    ("--label_key truth", "no column 'truth' (--label_key)"),
    ("--heldout_input_key question", "no column 'question' (--heldout_input_key)"),
    ("--analytic_bad_word_calc --single_prompt hello", "--bad_token_ids"),
    ("--proposal modulation_nn_head --proposal_lora_rank 2", "--proposal_lora_rank"),
    ("--reward_pretrain {folder}/model --placeholder_token . --reward_tokens y n --step_reward steps", "whole answers"),
    ("--enable_ema", "--enable_ema: the average would be saved and the last weights measured"),
    ("--save_info_path {folder}/prompts.jsonl/here", "prompts.jsonl is a file; give a folder"),
    ("--negdata_path {folder}/prompts.jsonl/here", "prompts.jsonl is a file; give a folder"),
    (f"{WORDS} --bad_token_ids 99999", "--bad_token_ids: give token ids from 0 to"),
    (f"{WORDS} --bad_token_ids 99999 --dry_run", "--bad_token_ids: give token ids from 0 to"),
    (f"{WORDS} --bad_token_ids 3 --dry_run", "--generate_max_len 8: the exact probability of bad words"),
]


@pytest.mark.parametrize("more, complaint", MISTAKES)
def test_a_mistake_is_told_in_one_line(folder, tmp_path, capsys, more, complaint):
    assert main(arguments(folder, tmp_path, "repulse", more.format(folder=folder))) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert complaint in line and line.startswith("trimtab tail: error: ")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_dry_run_only_warns_of_bad_words_that_are_not_known(folder, tmp_path, capsys):
    assert main(arguments(folder, tmp_path, "repulse", f"{WORDS} --dry_run")) == 0
    assert "warning: --analytic_bad_word_calc" in capsys.readouterr().out
