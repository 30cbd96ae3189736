import dataclasses
import re

import pytest

from tests.config.every_job import refusal
from trimtab.config.resolved_config import check, settle
from trimtab.config.rl_jobs import GRPOOptions, PPOOptions, ReinforceOptions, RLOOOptions

GIVEN = {"pretrain": "owner/model", "prompt_data": "owner/prompts", "reward_pretrain": "owner/judge"}


STEPS = {"placeholder_token": "#", "reward_tokens": ("+", "-")}
TAUGHT = {"reward_pretrain": None, "teacher_model": "owner/teacher"}


def warnings_of(job_class=PPOOptions, **changes):
    options, warnings = settle(job_class(**GIVEN | changes))
    return warnings + check(options)


@pytest.mark.parametrize("job_class", [PPOOptions, GRPOOptions, ReinforceOptions, RLOOOptions])
def test_defaults_pass_without_a_word(job_class):
    assert warnings_of(job_class) == []


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"prompt_data": None}, "--prompt_data is missing"),
        ({"prompt_data": " , "}, "--prompt_data ' , ' names no source"),
        ({"bf16": True, "exact": "on", "weight_only_int8": True}, "--exact on does not work with --weight_only_int8"),
        (
            {"bf16": True, "exact": "on", "rollout_engine": "vllm"},
            "--exact on: vLLM uses other kernels than the trainer",
        ),
        ({"prompt_data": "./absent.jsonl"}, "--prompt_data: ./absent.jsonl does not exist"),
        ({"prompt_data_probs": "0.5,0.5"}, "--prompt_data_probs has 2 numbers for 1 sources"),
        ({"prompt_max_len": 0}, "--prompt_max_len is 0"),
        ({"generate_max_len": 0}, "--generate_max_len is 0"),
        ({"max_len": 2047}, r"--max_len 2047 is less than --prompt_max_len \+ --generate_max_len \(2048\)"),
        ({"generate_min_len": 1025}, "--generate_min_len 1025 is more than --generate_max_len 1024"),
        ({"repetition_penalty": 0.0}, "--repetition_penalty is 0: it must be above 0"),
        ({"kl_clip": 0.0}, "--kl_clip is 0: it must be above 0"),
        ({"adam_eps": 0.0}, "--adam_eps is 0: it must be above 0"),
        ({"policy_loss_coef": -1.0}, "--policy_loss_coef is -1: it must be at least 0"),
        ({"micro_logprob_batch_size": 0}, "--micro_logprob_batch_size is 0"),
        ({"dynamic_filtering_batches": 0}, "--dynamic_filtering_batches is 0"),
        ({"dynamic_filtering_rule": "std"}, "--dynamic_filtering_rule is std: it must be mean or differing"),
        (
            {**STEPS, "running_reward_norm": True, "step_reward": "steps"},
            "--running_reward_norm: with --step_reward steps",
        ),
        ({"temperature": 0.0}, "--temperature is 0: it must be above 0"),
        ({"top_p": 0.0}, "--top_p is 0"),
        ({"top_p": 1.1}, "--top_p is 1.1"),
        ({"n_samples_per_prompt": 0}, "--n_samples_per_prompt is 0"),
        ({"rollout_batch_size": 0}, "--rollout_batch_size is 0"),
        ({"num_episodes": 0}, "--num_episodes is 0"),
        ({"micro_rollout_batch_size": 0}, "--micro_rollout_batch_size is 0"),
        ({"vllm_generate_batch_size": 2048}, "--vllm_generate_batch_size 2048 is more than --rollout_batch_size 1024"),
        ({"dynamic_filtering": True}, "--dynamic_filtering judges groups"),
        ({"dynamic_filtering_reward_range": (1.0, 0.0)}, "--dynamic_filtering_reward_range 1 0"),
        ({"rollout_slots": 0}, "--rollout_slots is 0"),
        ({"rollout_kv_tokens": 0}, "--rollout_kv_tokens is 0"),
        ({"reward_pretrain": None}, "nothing gives rewards"),
        ({"reward_pretrain": None, "replay": "rec", "eval_dataset": "owner/held-out"}, "--eval_dataset needs a reward"),
        ({**TAUGHT, "eval_dataset": "owner/held-out"}, "--eval_dataset needs a reward"),
        ({**TAUGHT, "dynamic_filtering": True, "n_samples_per_prompt": 4}, "--dynamic_filtering needs a reward"),
        ({**TAUGHT, "teacher_coef": -1.0}, "--teacher_coef is -1: it must be at least 0"),
        ({"teacher_divergence": "jsd"}, "--teacher_divergence jsd: there is no teacher; give --teacher_model"),
        ({"enable_ema": True, "ema_beta": 1.5}, "--ema_beta is 1.5: it must be between 0 and 1"),
        ({"enable_ema": True, "ema_beta": -0.1}, "--ema_beta is -0.1"),
        ({"pretrain_data": "owner/text", "ptx_coef": -1.0}, "--ptx_coef is -1: it must be at least 0"),
        ({"pretrain_data": "absent.jsonl"}, "--pretrain_data: absent.jsonl does not exist"),
        ({"reward_pretrain": "owner/a,./absent"}, "--reward_pretrain: ./absent does not exist"),
        ({"remote_rm_url": "./absent.py"}, "--remote_rm_url: ./absent.py does not exist"),
        ({"remote_rm_url": "./absent.py:judge"}, "--remote_rm_url: ./absent.py does not exist"),
        ({"remote_rm_url": "localhost:5000"}, "--remote_rm_url localhost:5000 is neither an address"),
        ({"reward_weights": (1.0, 2.0)}, "--reward_weights has 2 numbers for 1 rewards"),
        ({"reward_clip_range": (1.0, -1.0)}, "--reward_clip_range 1 -1"),
        ({"overlong_buffer_len": 0.0}, "--overlong_buffer_len is 0"),
        ({"overlong_buffer_len": 2000.0}, "--overlong_buffer_len 2000 is more than --generate_max_len 1024"),
        ({"advantage_estimator": "grpo"}, "--advantage_estimator is grpo"),
        ({"advantage_estimator": "rloo"}, "--advantage_estimator rloo compares"),
        ({"advantage_estimator": "reinforce_baseline"}, "--advantage_estimator reinforce_baseline compares"),
        ({"advantage_estimator": "group_norm"}, "--advantage_estimator group_norm compares"),
        ({"advantage_estimator": "dr_grpo"}, "--advantage_estimator dr_grpo compares"),
        ({"gamma": 1.5}, "--gamma is 1.5"),
        ({"lambd": -0.1}, "--lambd is -0.1"),
        ({"init_kl_coef": -0.1}, "--init_kl_coef is -0.1"),
        ({"kl_estimator": "k4"}, "--kl_estimator is k4"),
        ({"kl_target": 0.0}, "--kl_target is 0"),
        ({"kl_target": 6.0, "init_kl_coef": 0.0}, "--kl_target steers the weight of the KL"),
        ({"policy_loss_type": "dpo"}, "--policy_loss_type is dpo"),
        ({"eps_clip": 0.0}, "--eps_clip is 0"),
        ({"eps_clip_low_high": (0.0, 0.2)}, "--eps_clip_low_high 0 0.2"),
        ({"eps_clip_low_high": (1.2, 0.2)}, "--eps_clip_low_high 1.2 0.2"),
        ({"dual_clip": 1.0}, "--dual_clip is 1: it must be above 1"),
        ({"entropy_loss_coef": -1.0}, "--entropy_loss_coef is -1"),
        ({"value_clip": 0.0}, "--value_clip is 0"),
        ({"critic_pretrain": "./absent"}, "--critic_pretrain: ./absent does not exist"),
        ({"freezing_actor_steps": 5, "advantage_estimator": "reinforce"}, "--freezing_actor_steps trains the critic"),
        ({"freezing_actor_steps": -2}, "--freezing_actor_steps is -2: it must be at least -1"),
        (
            {"bootstrap_truncated": True, "advantage_estimator": "reinforce"},
            "--bootstrap_truncated asks the critic, and reinforce has none: drop it",
        ),
        ({"eval_n_samples_per_prompt": 0}, "--eval_n_samples_per_prompt is 0"),
        ({"save_rollouts": -1}, "--save_rollouts is -1"),
        ({"actor_num_nodes": 0}, "--actor_num_nodes is 0"),
        ({"critic_num_gpus_per_node": 0}, "--critic_num_gpus_per_node is 0"),
        ({"vllm_num_engines": -1}, "--vllm_num_engines is -1"),
        ({"nproc": 3, "ds_tensor_parallel_size": 2}, "--ds_tensor_parallel_size 2: 3 processes cannot be shared out"),
        (
            {"ray": True, "rollout_engine": "vllm", "vllm_num_engines": 0},
            "--rollout_engine vllm and --vllm_num_engines 0: ask for at least 1 engine",
        ),
        ({"rollout_max_tokens_per_gpu": 4096}, "--rollout_max_tokens_per_gpu is the token budget of a pass"),
        ({"train_max_tokens_per_gpu": 4096, "packing_samples": True}, "--train_max_tokens_per_gpu is the token budget"),
        (
            {"train_max_tokens_per_gpu": 2047, "use_dynamic_batch": True},
            r"--train_max_tokens_per_gpu 2047 cannot hold one sample of --prompt_max_len \+ --generate_max_len 2048",
        ),
        (
            {"rollout_max_tokens_per_gpu": 2047, "use_dynamic_batch": True},
            "--rollout_max_tokens_per_gpu 2047 cannot hold one sample",
        ),
    ],
)
def test_what_cannot_be_meant_is_one_line(changes, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.match(complaint, refusal(warnings_of, **changes))


@pytest.mark.parametrize(
    "changes, warning",
    [
        ({"init_kl_coef": 0.0, "use_kl_loss": True}, "--use_kl_loss has no effect without --init_kl_coef"),
        ({"use_kl_loss": True}, "--use_kl_loss with --kl_estimator k1 pulls nowhere"),
        ({"kl_estimator": "k3"}, "--kl_estimator k3 is meant for --use_kl_loss"),
        ({"kl_horizon": 5}, "--kl_horizon has no effect without --kl_target"),
        ({"eps_clip": 0.1, "eps_clip_low_high": (0.2, 0.3)}, "--eps_clip has no effect beside"),
        ({"overlong_penalty_factor": 2.0}, "--overlong_penalty_factor has no effect without --overlong_buffer_len"),
        ({"advantage_estimator": "reinforce", "lambd": 0.9, "value_clip": 0.1}, "--value_clip, --lambd without effect"),
        ({"advantage_estimator": "rloo", "n_samples_per_prompt": 4, "gamma": 0.9}, "--gamma has no effect"),
        (
            {"advantage_estimator": "rloo", "n_samples_per_prompt": 4, "no_advantage_std_norm": True},
            "--no_advantage_std_norm has no effect: rloo",
        ),
        ({"rollout_batch_size": 100}, "an iteration has 100 samples, fewer than --train_batch_size 128"),
        ({"rollout_batch_size": 200}, "the last step of an iteration has 72 samples"),
        ({"n_samples_per_prompt": 3}, "a step has 126 samples, not --train_batch_size 128: groups of 3 stay whole"),
        ({"n_samples_per_prompt": 256}, "a step has 256 samples, not --train_batch_size 128"),
        ({"vllm_tensor_parallel_size": 2}, "--vllm_tensor_parallel_size has no effect without --vllm_num_engines"),
        ({"ptx_coef": 0.1}, "--ptx_coef has no effect without --pretrain_data"),
        (
            {"reward_pretrain": None, "reward_verifier": "gsm8k", "normalize_reward": True},
            "--normalize_reward has no effect",
        ),
    ],
)
def test_what_is_probably_not_meant_is_one_warning(changes, warning):
    (found,) = warnings_of(**changes)
    assert re.match(warning, found)


@pytest.mark.parametrize(
    "changes",
    [
        {"vllm_num_engines": 0},
        {"vllm_enable_sleep": True, "enable_prefix_caching": True, "actor_init_on_gpu": True, "perf": True},
        {"kl_target": 6.0, "kl_horizon": 100},
        {"reward_pretrain": "owner/a,owner/b", "reward_weights": (1.0, 0.5)},
        {"reward_pretrain": None, "reward_verifier": "gsm8k:1.0,format:0.2"},
        {"remote_rm_url": "http://here:1/get_reward,https://there/", "reward_weights": (1, 2)},
        TAUGHT,
        {"reward_pretrain": None, "replay": "rec", "n_samples_per_prompt": 4},
        {"pretrain_data": "owner/text", "ptx_coef": 0.0},
        {"entropy_loss_coef": 0.0},
        {"eps_clip_low_high": (0.2, 0.28), "dual_clip": 3.0},
        {"n_samples_per_prompt": 4, "dynamic_filtering": True, "vllm_generate_batch_size": 2048},
        {"eval_dataset": "owner/held-out"},
        # A restriction of another engine that does not exist here.
        {"eval_dataset": "owner/held-out", "eval_steps": 5, "dynamic_filtering": True, "n_samples_per_prompt": 8},
        {"use_dynamic_batch": True, "train_max_tokens_per_gpu": 2048},
        {"init_kl_coef": 0.0},
        {"rollout_batch_size": 16, "n_samples_per_prompt": 8},
    ],
)
def test_what_may_be_meant_passes_without_a_word(changes):
    assert warnings_of(**changes) == []


def test_a_reward_file_may_be_followed_by_a_functions_name(tmp_path):
    (tmp_path / "judge.py").write_text("")
    for place in (f"{tmp_path}/judge.py", f"{tmp_path}/judge.py:strict"):
        assert warnings_of(reward_pretrain=None, remote_rm_url=place) == []


def test_dynamic_batches_are_packing_with_a_budget_that_holds_a_sample():
    def settled(**changes):
        options, _ = settle(PPOOptions(use_dynamic_batch=True, **changes))
        return options.packing_samples, options.train_max_tokens_per_gpu, options.rollout_max_tokens_per_gpu

    assert settled() == (True, 16_192, 16_192)
    assert settled(train_max_tokens_per_gpu=4096) == (True, 4096, 4096)
    assert settled(rollout_max_tokens_per_gpu=8192) == (True, 16_192, 8192)
    assert settled(generate_max_len=20_000) == (True, 21_024, 21_024)


@pytest.mark.parametrize(
    "changes, processes",
    [
        ({}, 1),
        ({"actor_num_gpus_per_node": 4}, 4),
        ({"actor_num_gpus_per_node": 4, "nproc": 2}, 2),
        ({"vllm_num_engines": 4, "vllm_tensor_parallel_size": 2, "colocate_all_models": True}, 8),
        ({"vllm_num_engines": 4}, 1),
    ],
)
def test_the_policys_gpus_say_how_many_processes_train(changes, processes):
    assert settle(PPOOptions(**changes))[0].nproc == processes


def test_settling_twice_changes_nothing_more():
    once, _ = settle(PPOOptions(**GIVEN, use_dynamic_batch=True, actor_num_gpus_per_node=2))
    assert dataclasses.asdict(settle(once)[0]) == dataclasses.asdict(once)
