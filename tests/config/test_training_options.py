import dataclasses

import pytest

from tests.config.every_job import EVERY_JOB
from trimtab.config import (
    data_options,
    inference_options,
    objective_options,
    placement_options,
    rl_options,
    training_options,
)
from trimtab.config.aliases import ALIASES, meant
from trimtab.config.data_options import AgentTrainingOptions, DataOptions, EnvironmentOptions
from trimtab.config.jobs import (
    ChatOptions,
    DPOOptions,
    GenerateOptions,
    KDOptions,
    KTOOptions,
    PRMOptions,
    RMOptions,
    SFTOptions,
)
from trimtab.config.objective_options import JudgeOptions
from trimtab.config.option import Limits, Options, options_of
from trimtab.config.rl_jobs import AnyRLOptions, DAPOOptions, GRPOOptions, PPOOptions, ReinforceOptions, RLOOOptions

SHARED_DEFAULTS = {
    **{"save_path": "./ckpt", "save_steps": -1, "save_hf_ckpt": False, "disable_ds_ckpt": False, "logging_steps": 1},
    **{"eval_steps": -1, "max_ckpt_num": 3, "max_ckpt_mem": 10**8, "load_checkpoint": False, "train_batch_size": 128},
    **{"use_ds_universal_ckpt": False, "max_norm": 1.0, "gradient_checkpointing": False, "deepcompile": False},
    **{"seed": 42, "full_determinism": False, "overlap_comm": False, "pretrain": None, "grad_accum_dtype": None},
    **{"local_rank": -1, "zero_stage": 2, "bf16": False, "zpg": 1, "adam_offload": False, "flash_attn": False},
    **{"gradient_checkpointing_use_reentrant": False, "disable_fast_tokenizer": False, "ds_tensor_parallel_size": 1},
    **{"aux_loss_coef": 0.0, "lr_warmup_ratio": 0.03, "l2": 0.0, "min_lr_ratio": 0.1, "use_liger_kernel": False},
    **{"lr_scheduler": "cosine_with_min_lr", "adam_betas": (0.9, 0.95), "ring_attn_size": 1, "ring_head_stride": 1},
    **{"load_in_4bit": False, "lora_rank": 0, "lora_alpha": 16, "target_modules": ("all-linear",), "lora_dropout": 0.0},
    **{"packing_samples": False, "dataset": None, "dataset_probs": None, "eval_dataset": None},
    **{"dataset_split": "train", "max_samples": 1_000_000, "use_tensorboard": None, "use_ms": False},
    **{"use_wandb": None, "wandb_org": None, "wandb_group": None},
}
TEMPLATE = "User: {}\nAssistant: "
CHAT = {"apply_chat_template": False, "tokenizer_chat_template": None}
PAIRS = {**CHAT, "input_template": None, "prompt_key": None, "chosen_key": "chosen", "rejected_key": "rejected"}
OWN_DEFAULTS = {
    SFTOptions: {
        **CHAT,
        **{"ckpt_path": None, "micro_train_batch_size": 8, "max_epochs": 2, "learning_rate": 5e-6},
        **{"max_len": 2048, "eval_split": "train", "input_key": "input", "output_key": None},
        **{"input_template": TEMPLATE, "multiturn": False, "pretrain_mode": False},
        **{"wandb_project": "trimtab_train_sft"},
    },
    RMOptions: {
        **PAIRS,
        **{"ckpt_path": None, "micro_train_batch_size": 1, "max_epochs": 1, "learning_rate": 9e-6},
        **{"max_len": 512, "eval_split": "train", "value_head_prefix": "score", "loss": "sigmoid"},
        **{"compute_fp32_loss": False, "margin_loss": False, "wandb_project": "trimtab_train_rm"},
    },
    PRMOptions: {
        **{"ckpt_path": None, "micro_train_batch_size": 1, "max_epochs": 1, "learning_rate": 1e-6},
        **{"max_len": 2048, "eval_split": "test", "input_key": "input", "label_key": "label"},
        **{"placeholder_token": None, "reward_tokens": None, "wandb_project": "trimtab_train_prm"},
    },
    DPOOptions: {
        **PAIRS,
        **{"ckpt_path": None, "micro_train_batch_size": 8, "max_epochs": 1, "learning_rate": 1e-5},
        **{"max_len": 512, "eval_split": "test", "beta": 0.1, "ipo": False, "label_smoothing": 0.0},
        **{"nll_loss_coef": 0.0, "ref_pretrain": None, "ref_offload": False, "wandb_project": "trimtab_train_dpo"},
    },
    KTOOptions: {
        **CHAT,
        **{"ckpt_path": None, "micro_train_batch_size": 8, "max_epochs": 1, "learning_rate": 1e-5},
        **{"max_len": 2048, "eval_split": "test", "beta": 0.01, "ref_offload": False, "input_template": TEMPLATE},
        **{"desirable_loss_weight": 1.0, "undesirable_loss_weight": 1.0, "wandb_project": "trimtab_train_kto"},
        **{"input_key": "input", "output_key": None, "label_key": "label"},
    },
    KDOptions: {
        **CHAT,
        **{"ckpt_path": None, "micro_train_batch_size": 8, "max_epochs": 1, "learning_rate": 5e-6},
        **{"max_len": 2048, "eval_split": "test", "teacher_model": None, "teacher_offload": False, "kd_coef": 0.4},
        **{"input_key": "input", "output_key": "output", "input_template": TEMPLATE, "pretrain_mode": False},
        **{"wandb_project": "trimtab_train_kd"},
    },
}

PPO_DEFAULTS = {
    **{"ckpt_path": None, "micro_train_batch_size": 4, "max_epochs": 1, "num_episodes": 1},
    **{"rollout_batch_size": 1024, "micro_rollout_batch_size": 8, "n_samples_per_prompt": 1, "max_samples": 10**8},
    **{"prompt_data": None, "prompt_data_probs": None, "prompt_split": "train", "eval_split": "train"},
    **{"prompt_max_len": 1024, "generate_max_len": 1024, "max_len": None, "input_key": "input", "label_key": None},
    **{"input_template": None, "apply_chat_template": False, "temperature": 1.0, "top_p": 1.0},
    **{"vllm_generate_batch_size": None, "dynamic_filtering": False, "dynamic_filtering_reward_range": (0, 1)},
    **{"use_dynamic_batch": False, "rollout_max_tokens_per_gpu": None, "advantage_estimator": "gae"},
    **{"gamma": 1.0, "lambd": 1.0, "no_advantage_std_norm": False, "policy_loss_type": "ppo", "eps_clip": 0.2},
    **{"eps_clip_low_high": None, "dual_clip": None, "value_clip": 0.5, "entropy_loss_coef": None},
    **{"freezing_actor_steps": -1, "save_value_network": False, "actor_learning_rate": 1e-6},
    **{"critic_learning_rate": 9e-6, "critic_pretrain": None, "value_head_prefix": "score"},
    **{"init_kl_coef": 0.01, "kl_target": None, "kl_horizon": 10_000, "kl_estimator": "k1", "use_kl_loss": False},
    **{"reward_pretrain": None, "remote_rm_url": None, "normalize_reward": False, "reward_clip_range": (-10, 10)},
    **{"overlong_buffer_len": None, "overlong_penalty_factor": 1, "enable_ema": False, "ema_beta": 0.992},
    **{"eval_temperature": 0.6, "eval_n_samples_per_prompt": 4, "perf": False, "ptx_coef": 0.05},
    **{"pretrain_data": None, "pretrain_data_probs": "1.0", "pretrain_split": "train", "ref_reward_offload": False},
    **{"colocate_actor_ref": False, "colocate_critic_reward": False, "colocate_all_models": False},
    **{"vllm_num_engines": None, "vllm_tensor_parallel_size": 1, "vllm_gpu_memory_utilization": 0.95},
    **{"vllm_sync_backend": "nccl", "vllm_sync_with_ray": False, "vllm_enable_sleep": False, "enforce_eager": False},
    **{"enable_prefix_caching": False, "enable_vllm_is_correction": False, "vllm_is_truncated_threshold": 2},
    **{"deepspeed_enable_sleep": False, "actor_init_on_gpu": False, "async_train": False, "agent_func_path": None},
    **{"async_queue_size": 1, "partial_rollout": False},
    **{f"{role}_num_nodes": 1 for role in ("actor", "ref", "critic", "reward")},
    # OpenRLHF says 8: here an unset number is what is there.
    **{f"{role}_num_gpus_per_node": None for role in ("actor", "ref", "critic", "reward")},
    **{"save_rollouts": 8, "rollout_slots": 256, "rollout_kv_tokens": None, "weight_only_int8": False},
    **{"reward_weights": None, "reward_verifier": None, "wandb_project": "trimtab_train_ppo"},
}
OWN_OF_RL = """config dry_run check_only skip_checks nproc rehearse rehearse_rank dist_backend num_workers
    use_visualdl use_trackio
    trackio_project attn_implementation wandb_http_proxy tokenizer_chat_template wandb_run_name train_max_tokens_per_gpu
    loss_reduction report_samples
    fit_memory eval_max_samples trust_remote_code keep_dropout hang_timeout max_steps gradient_accumulation_steps
    overwrite push_to_hub hub_private_repo controller_apart
    shard_size gradient_checkpointing_layers gradient_checkpointing_keep offload_activations
    compile exact ray max_restarts restart_wait rollout_engine vllm_sync_lora async_staleness async_timeout
    bootstrap_truncated mismatch_correction mismatch_range teacher_model teacher_coef teacher_divergence jsd_beta
    teacher_prompt_key teacher_prompt_func teacher_ema record replay placeholder_token reward_tokens
    step_reward step_separator reward_func reward_timeout generate_min_len repetition_penalty adam_eps
    policy_loss_coef kl_clip running_reward_norm micro_logprob_batch_size micro_reward_batch_size
    micro_value_batch_size dynamic_filtering_rule dynamic_filtering_batches truncate_prompts drop_last no_shuffle
    sapo_temperatures cov_ratio clip_cov_range kl_cov_coef entropy_target entropy_coef_step entropy_coef_max
    difficulty difficulty_after difficulty_range difficulty_return difficulty_solved optimizer muon_momentum
    muon_scale routing_replay"""
GROUP = {"n_samples_per_prompt": 8}
GENERATE_DEFAULTS = {
    **{"eval_task": "generate", "zero_stage": 0, "local_rank": -1, "bf16": False, "flash_attn": False},
    **{"disable_fast_tokenizer": False, "micro_batch_size": 16, "seed": 1234, "full_determinism": False},
    **{"pretrain": None, "value_head_prefix": "value_head", "dataset": None, "dataset_probs": None},
    **{"input_key": "input", "output_key": "output", "apply_chat_template": False, "input_template": None},
    **{"max_len": 2048, "max_samples": 10**8, "output_path": None, "prompt_max_len": 1024, "max_new_tokens": 1024},
    **{"greedy_sampling": False, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0, "best_of_n": 1},
    **{"post_processor": None, "tp_size": None, "max_num_seqs": 256, "enable_prefix_caching": False, "iter": None},
    **{"rollout_batch_size": 2048, "normalize_reward": False, "reward_template": None, "enable_csft": False},
    **{"csft_prompt": "<rm_score>: 5.00", "use_ms": False, "attn_implementation": None},
}
CHAT_DEFAULTS = {
    **{"bf16": False, "flash_attn": False, "disable_fast_tokenizer": False, "load_in_4bit": False, "pretrain": None},
    **{"max_len": 4096, "greedy_sampling": False, "top_p": 0.9, "temperature": 0.2, "repetition_penalty": 1.2},
    **{"input_template": TEMPLATE, "apply_chat_template": False, "ta_prompt": None, "enable_csft": False},
    **{"csft_prompt": "<rm_score>: 5.00", "use_ms": False, "attn_implementation": None},
}
PRESETS = {
    AnyRLOptions: {},
    GRPOOptions: {
        **GROUP,
        **{"advantage_estimator": "group_norm", "use_kl_loss": True, "kl_estimator": "k3", "init_kl_coef": 1e-3},
    },
    DAPOOptions: {
        **GROUP,
        **{"advantage_estimator": "group_norm", "eps_clip_low_high": (0.2, 0.28), "init_kl_coef": 0.0},
        "dynamic_filtering": True,
    },
    ReinforceOptions: {"advantage_estimator": "reinforce"},
    RLOOOptions: {**GROUP, "advantage_estimator": "rloo"},
}


@pytest.mark.parametrize("job_class", OWN_DEFAULTS)
def test_defaults_are_those_of_openrlhf(job_class):
    expected = SHARED_DEFAULTS | OWN_DEFAULTS[job_class]
    assert {name: getattr(job_class(), name) for name in expected} == expected


def test_defaults_of_ppo_are_those_of_openrlhf():
    shared = {name: value for name, value in SHARED_DEFAULTS.items() if not name.startswith("dataset")}
    expected = shared | PPO_DEFAULTS
    assert {name: getattr(PPOOptions(), name) for name in expected} == expected
    own = {field.name for field in dataclasses.fields(AgentTrainingOptions)} - {"agent_func_path", "given"}
    own |= {field.name for field in dataclasses.fields(JudgeOptions)} - {"given"}
    assert options_of(PPOOptions).keys() == expected.keys() | own | set(OWN_OF_RL.split())


@pytest.mark.parametrize(
    "job_class, expected, own",
    [
        (
            GenerateOptions,
            GENERATE_DEFAULTS,
            {"dataset_split", "label_key", "reward_pretrain", "remote_rm_url", "reward_verifier", "reward_weights"}
            | {"reward_func", "reward_timeout"}
            | {"nproc", "load_in_4bit", "hang_timeout", "rollout_engine"}
            | {field.name for field in dataclasses.fields(EnvironmentOptions)} - {"given"}
            | {field.name for field in dataclasses.fields(JudgeOptions)} - {"given"},
        ),
        (ChatOptions, CHAT_DEFAULTS, {"seed", "full_determinism"}),
    ],
)
def test_generation_and_chat_have_the_options_of_openrlhf_and_few_of_their_own(job_class, expected, own):
    # OpenRLHF names no task by default, and gives vLLM all GPUs.
    assert {name: getattr(job_class(), name) for name in expected} == expected
    own |= {"config", "dry_run", "tokenizer_chat_template", "trust_remote_code"}
    assert options_of(job_class).keys() == expected.keys() | own


@pytest.mark.parametrize("job_class", PRESETS)
def test_the_other_rl_jobs_are_ppo_with_other_defaults(job_class):
    ppo, preset = options_of(PPOOptions), options_of(job_class)
    differing = {name: option.default for name, option in preset.items() if option.default != ppo[name].default}
    assert preset.keys() == ppo.keys()
    names = {"wandb_project": f"trimtab_train_{job_class.verb}"}
    assert differing == PRESETS[job_class] | names
    assert job_class.trainer == PPOOptions.trainer == "rl" and SFTOptions.trainer == "supervised"


def test_every_training_job_packs_and_resumes():
    for job_class in [*OWN_DEFAULTS, PPOOptions]:
        assert {"packing_samples", "train_max_tokens_per_gpu", "load_checkpoint"} <= options_of(job_class).keys()


def test_no_option_is_declared_in_two_groups():
    modules = (data_options, inference_options, objective_options, placement_options, rl_options, training_options)
    found = {
        group
        for module in modules
        for group in vars(module).values()
        if isinstance(group, type) and issubclass(group, Options)
    }
    options = [name for group in found for name in options_of(group)]
    declared = [name for group in found for name in vars(group).get("__annotations__", {}) if name in options]
    assert "pretrain" in declared and "beta" in declared and "gamma" in declared
    # The first three may be left unset in RL, and mean something else there; so do the others in generation or attacks.
    twice = {"label_key", "max_len", "teacher_model", "rollout_batch_size", "normalize_reward", "output_path"}
    twice |= {"ckpt_path", "reward_pretrain"}
    assert {name for name in declared if declared.count(name) > 1} == twice


@pytest.mark.parametrize("job_class", EVERY_JOB)
def test_every_option_has_help_and_no_empty_one(job_class):
    assert all(option.help for option in options_of(job_class).values())
    assert options_of(job_class).keys() | {"given", "notes", "origins"} == {
        known.name for known in dataclasses.fields(job_class)
    }


def test_every_alias_leads_to_an_option_and_hides_none():
    names = {name for job_class in EVERY_JOB for name in options_of(job_class)}
    assert {name for meanings in ALIASES.values() for name in meanings} <= names
    for job_class in EVERY_JOB:
        known = options_of(job_class)
        assert all(meant(name, known) == name for name in known)


def test_a_job_changes_a_default_for_itself_only_and_keeps_help_and_section():
    class ProbeOptions(DataOptions, max_len=7):
        """Probe"""

    assert ProbeOptions().max_len == 7
    assert DataOptions().max_len == SFTOptions().max_len == 2048
    assert options_of(ProbeOptions)["max_len"].section == "Data"
    assert options_of(ProbeOptions)["max_len"].help == options_of(SFTOptions)["max_len"].help
    assert options_of(ProbeOptions)["max_len"].limits == options_of(SFTOptions)["max_len"].limits != Limits()


def test_a_job_cannot_change_the_default_of_an_option_it_does_not_have():
    with pytest.raises(KeyError, match="learning_rate"):

        class ProbeOptions(DataOptions, learning_rate=1.0):
            """Probe"""
