import dataclasses

import pytest

from trimtab.config import groups
from trimtab.config.catalogue import options_of
from trimtab.config.jobs import SFTOptions, job
from trimtab.config.spellings import ALIASES

OPENRLHF_DEFAULTS = {
    **{"save_path": "./ckpt", "save_steps": -1, "save_hf_ckpt": False, "disable_ds_ckpt": False, "logging_steps": 1},
    **{"eval_steps": -1, "ckpt_path": "./ckpt/checkpoints_sft", "max_ckpt_num": 3, "max_ckpt_mem": 10**8},
    **{"load_checkpoint": False, "use_ds_universal_ckpt": False, "micro_train_batch_size": 8, "train_batch_size": 128},
    **{"max_norm": 1.0, "gradient_checkpointing": False, "deepcompile": False, "seed": 42, "full_determinism": False},
    **{"local_rank": -1, "zero_stage": 2, "bf16": False, "zpg": 1, "adam_offload": False, "flash_attn": False},
    **{"use_liger_kernel": False, "grad_accum_dtype": None, "overlap_comm": False, "max_epochs": 2, "pretrain": None},
    **{"gradient_checkpointing_use_reentrant": False, "disable_fast_tokenizer": False, "ds_tensor_parallel_size": 1},
    **{"aux_loss_coef": 0.0, "learning_rate": 5e-6, "lr_warmup_ratio": 0.03, "pretrain_mode": False, "l2": 0.0},
    **{"lr_scheduler": "cosine_with_min_lr", "adam_betas": (0.9, 0.95), "ring_attn_size": 1, "ring_head_stride": 1},
    **{"load_in_4bit": False, "lora_rank": 0, "lora_alpha": 16, "target_modules": ("all-linear",), "lora_dropout": 0.0},
    **{"packing_samples": False, "dataset": None, "dataset_probs": None, "eval_dataset": None, "eval_split": "train"},
    **{"dataset_split": "train", "max_samples": 1_000_000, "multiturn": False, "input_key": "input"},
    **{"output_key": None, "input_template": "User: {}\nAssistant: ", "apply_chat_template": False, "max_len": 2048},
    **{"tokenizer_chat_template": None, "use_wandb": None, "wandb_org": None, "wandb_group": None},
    **{"wandb_project": "trimtab_train_sft", "use_tensorboard": None, "use_ms": False},
}


def test_sft_defaults_are_those_of_openrlhf():
    options = SFTOptions()
    assert {name: getattr(options, name) for name in OPENRLHF_DEFAULTS} == OPENRLHF_DEFAULTS


def test_no_option_is_declared_in_two_groups():
    declared = [
        name
        for group in vars(groups).values()
        if isinstance(group, type) and dataclasses.is_dataclass(group)
        for name in group.__annotations__
    ]
    assert len(declared) == len(set(declared))


def test_every_option_has_help_and_no_empty_one():
    assert all(option.help for option in options_of(SFTOptions).values())
    assert options_of(SFTOptions).keys() == {known.name for known in dataclasses.fields(SFTOptions)}


def test_every_alias_leads_to_an_option_and_hides_none():
    names = options_of(SFTOptions).keys()
    assert set(ALIASES.values()) <= names
    assert not ALIASES.keys() & names


def test_a_job_changes_a_default_for_itself_only_and_keeps_help_and_section():
    @job("probe", max_len=7)
    class ProbeOptions(groups.DataOptions):
        """Probe"""

    assert ProbeOptions().max_len == 7
    assert groups.DataOptions().max_len == SFTOptions().max_len == 2048
    assert options_of(ProbeOptions)["max_len"].section == "Data"
    assert options_of(ProbeOptions)["max_len"].help == options_of(SFTOptions)["max_len"].help


def test_a_job_cannot_change_the_default_of_an_option_it_does_not_have():
    with pytest.raises(KeyError, match="learning_rate"):

        @job("probe", learning_rate=1.0)
        class ProbeOptions(groups.DataOptions):
            """Probe"""
