"""The commands that OpenRLHF's documents give for the jobs other than SFT, with names of models and data exchanged."""

import dataclasses
import shlex

import pytest

from trimtab.config.checks import check, settle
from trimtab.config.jobs import DPOOptions, KTOOptions, LoraCombineOptions, PRMOptions, RMOptions
from trimtab.config.parse import parse
from trimtab.config.support import refuse_unimplemented

OFTEN = """--save_steps -1 --logging_steps 1 --eval_steps -1 --bf16 --max_epochs 1 --zero_stage 3 --pretrain owner/model
    --dataset owner/data --gradient_checkpointing"""
CHAT_PAIRS = f"{OFTEN} --apply_chat_template --chosen_key chosen --rejected_key rejected"
STEPS = """--input_key input --load_checkpoint --packing_samples --wandb_group prm --placeholder_token ки
    --reward_tokens + -"""

COMMANDS = [
    (
        DPOOptions,
        f"""--save_path ./checkpoint/dpo {CHAT_PAIRS} --max_samples 50000 --train_batch_size 32
        --micro_train_batch_size 2 --max_len 1024 --learning_rate 1e-7 --beta 0.1 --load_checkpoint""",
        {"beta": 0.1, "learning_rate": 1e-7, "max_len": 1024, "apply_chat_template": True, "preference_loss": "dpo"},
    ),
    (
        DPOOptions,
        f"""--save_path ./checkpoint/dpo {CHAT_PAIRS} --train_batch_size 256 --micro_train_batch_size 1 --max_len 8192
        --learning_rate 5e-8 --beta 0.1 --flash_attn --adam_offload""",
        {"adam_offload": True, "chosen_key": "chosen", "rejected_key": "rejected", "prompt_key": None},
    ),
    (
        DPOOptions,
        f"--save_path ./dpo {CHAT_PAIRS} --ipo --ref_offload --packing_samples --nll_loss_coef 0.2",
        {"preference_loss": "ipo", "ipo": True, "ref_offload": True, "nll_loss_coef": 0.2},
    ),
    (
        DPOOptions,
        f"--save_path ./dpo {CHAT_PAIRS} --label_smoothing 0.1",
        {"preference_loss": "dpo", "label_smoothing": 0.1},
    ),
    (
        RMOptions,
        f"""--save_path ./checkpoint/rm {CHAT_PAIRS} --max_samples 50000 --train_batch_size 16
        --micro_train_batch_size 2 --max_len 1024 --learning_rate 2e-7 --load_checkpoint""",
        {"learning_rate": 2e-7, "value_head_prefix": "score", "loss": "sigmoid"},
    ),
    (
        RMOptions,
        f"""--save_path ./checkpoint/rm {CHAT_PAIRS} --train_batch_size 256 --micro_train_batch_size 4 --max_len 8192
        --learning_rate 9e-6 --flash_attn --packing_samples --value_prefix_head score""",
        {"packing_samples": True, "value_head_prefix": "score", "micro_train_batch_size": 4},
    ),
    (
        PRMOptions,
        f"""--save_path ./checkpoint/prm {OFTEN} --max_samples 50000 --train_batch_size 32 --micro_train_batch_size 2
        --max_len 8192 --learning_rate 2e-7 --label_key value {STEPS}""",
        {"label_key": "value", "placeholder_token": "ки", "reward_tokens": ("+", "-"), "packing_samples": True},
    ),
    (
        PRMOptions,
        f"""--save_path ./prm {OFTEN} --save_steps 500 --eval_steps 100 --train_batch_size 256
        --micro_train_batch_size 8 --max_len 8192 --learning_rate 1e-6 --label_key label --flash_attn {STEPS}""",
        {"save_steps": 500, "eval_steps": 100, "reward_tokens": ("+", "-")},
    ),
    (
        KTOOptions,
        f"""--save_path ./checkpoint/kto {OFTEN} --train_batch_size 64 --micro_train_batch_size 1 --max_len 8192
        --learning_rate 2e-7 --input_key instruction --output_key response --label_key score --beta 0.1""",
        {"micro_train_batch_size": 1, "beta": 0.1, "label_key": "score", "output_key": "response"},
    ),
    (
        LoraCombineOptions,
        "--model_path owner/base --lora_path owner/adapter --output_path ./checkpoint/merged --is_rm --bf16",
        {"model_path": "owner/base", "output_path": "./checkpoint/merged", "is_rm": True, "bf16": True},
    ),
]


@pytest.mark.parametrize("job_class, words, expected", COMMANDS)
def test_documented_commands_are_understood_and_pass_the_checks(job_class, words, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, warnings = settle(parse(job_class, shlex.split(words)))
    warnings += check(options)
    refuse_unimplemented(options)
    assert {name: getattr(options, name) for name in expected} == expected
    assert warnings in ([], ["--wandb_group has no effect without --use_wandb"])


@pytest.mark.parametrize(
    "job_class, written, meant",
    [
        (RMOptions, "--value_prefix_head head", {"value_head_prefix": "head"}),
        (
            KTOOptions,
            "--desirable_weight 2 --undesirable_weight 0.5",
            {"desirable_loss_weight": 2, "undesirable_loss_weight": 0.5},
        ),
        (KTOOptions, "--max_epoch 3 --train_split half", {"max_epochs": 3, "dataset_split": "half"}),
    ],
)
def test_other_spellings_change_what_they_mean_and_nothing_else(job_class, written, meant):
    assert parse(job_class, written.split()) == dataclasses.replace(job_class(), **meant)


def test_reward_tokens_may_be_any_words_in_any_place():
    words = shlex.split("--reward_tokens + - --bf16 --placeholder_token None")
    options = parse(PRMOptions, words)
    assert (options.reward_tokens, options.bf16, options.placeholder_token) == (("+", "-"), True, None)
    assert parse(PRMOptions, ["--reward_tokens", "1", "-1", "None"]).reward_tokens == ("1", "-1", "None")
    assert parse(PRMOptions, ["--reward_tokens", "None"]).reward_tokens is None
