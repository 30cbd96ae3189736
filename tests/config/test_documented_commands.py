"""The commands that OpenRLHF's documents give for the jobs other than SFT, with names of models and data exchanged."""

import dataclasses
import shlex

import pytest

from trimtab.config.jobs import JOBS, KTOOptions, PRMOptions, RMOptions
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, hardware_problems, refuse_unimplemented, settle
from trimtab.config.rl_jobs import PPOOptions

OFTEN = """--save_steps -1 --logging_steps 1 --eval_steps -1 --bf16 --max_epochs 1 --zero_stage 3 --pretrain owner/model
    --dataset owner/data --gradient_checkpointing"""
CHAT_PAIRS = f"{OFTEN} --apply_chat_template --chosen_key chosen --rejected_key rejected"
STEPS = """--input_key input --load_checkpoint --packing_samples --wandb_group prm --placeholder_token ки
    --reward_tokens + -"""

LARGE = "--max_len 8192"

# What is meant by the documents' commands, by the document and the verb.
COMMANDS = {
    "ascend small dpo": (
        f"""--save_path ./checkpoint/dpo {CHAT_PAIRS} --max_samples 50000 --train_batch_size 32
        --micro_train_batch_size 2 --max_len 1024 --learning_rate 1e-7 --beta 0.1 --load_checkpoint""",
        {"beta": 0.1, "learning_rate": 1e-7, "max_len": 1024, "apply_chat_template": True, "preference_loss": "dpo"},
    ),
    "ascend dpo": (
        f"""--save_path ./checkpoint/dpo {CHAT_PAIRS} --train_batch_size 256 --micro_train_batch_size 1 {LARGE}
        --learning_rate 5e-8 --beta 0.1 --flash_attn --adam_offload""",
        {"adam_offload": True, "chosen_key": "chosen", "rejected_key": "rejected", "prompt_key": None},
    ),
    "ascend small rm": (
        f"""--save_path ./checkpoint/rm {CHAT_PAIRS} --max_samples 50000 --train_batch_size 16
        --micro_train_batch_size 2 --max_len 1024 --learning_rate 2e-7 --load_checkpoint""",
        {"learning_rate": 2e-7, "value_head_prefix": "score", "loss": "sigmoid"},
    ),
    "ascend rm": (
        f"""--save_path ./checkpoint/rm {CHAT_PAIRS} --train_batch_size 256 --micro_train_batch_size 1 {LARGE}
        --learning_rate 1e-8 --load_checkpoint""",
        {"learning_rate": 1e-8, "packing_samples": False},
    ),
    **{
        f"{document} rm": (
            f"""--save_path ./checkpoint/rm {CHAT_PAIRS} --train_batch_size 256 --micro_train_batch_size {size} {LARGE}
            --learning_rate 9e-6 --flash_attn --packing_samples {more} --use_wandb {{wandb_token}}""",
            {"packing_samples": True, "value_head_prefix": "score", "micro_train_batch_size": size},
        )
        for document, size, more in (("chinese", 1, "--load_checkpoint"), ("guide", 4, ""), ("readme", 1, ""))
    },
    "ascend small prm": (
        f"""--save_path ./checkpoint/prm {OFTEN} --max_samples 50000 --train_batch_size 32 --micro_train_batch_size 2
        {LARGE} --learning_rate 2e-7 --label_key value {STEPS}""",
        {"label_key": "value", "placeholder_token": "ки", "reward_tokens": ("+", "-"), "packing_samples": True},
    ),
    **{
        f"{document} prm": (
            f"""--save_path ./checkpoint/prm {OFTEN} --save_steps 500 --eval_steps 100 --train_batch_size 256
            --micro_train_batch_size 8 {LARGE} --learning_rate 1e-6 {more} {STEPS}""",
            {"save_steps": 500, "eval_steps": 100, "reward_tokens": ("+", "-")},
        )
        for document, more in (("ascend", "--label_key value"), ("guide", "--label_key label --flash_attn"))
    },
    "ascend kto": (
        f"""--save_path ./checkpoint/kto {OFTEN} --train_batch_size 64 --micro_train_batch_size 1 {LARGE}
        --learning_rate 2e-7 --input_key instruction --output_key response --label_key score --beta 0.1""",
        {"micro_train_batch_size": 1, "beta": 0.1, "label_key": "score", "output_key": "response"},
    ),
}
OTHERS = [
    (
        "dpo",
        f"--save_path ./dpo {CHAT_PAIRS} --ipo --ref_offload --packing_samples --nll_loss_coef 0.2",
        {"preference_loss": "ipo", "ipo": True, "ref_offload": True, "nll_loss_coef": 0.2},
    ),
    (
        *("dpo", f"--save_path ./dpo {CHAT_PAIRS} --label_smoothing 0.1"),
        {"preference_loss": "dpo", "label_smoothing": 0.1},
    ),
    ("rm", f"--save_path ./rm {CHAT_PAIRS} --value_prefix_head score", {"value_head_prefix": "score"}),
    (
        "lora-combine",
        "--model_path owner/base --lora_path owner/adapter --output_path ./checkpoint/merged --is_rm --bf16",
        {"model_path": "owner/base", "output_path": "./checkpoint/merged", "is_rm": True, "bf16": True},
    ),
    (
        "generate",
        """--eval_task generate --pretrain owner/policy --bf16 --max_new_tokens 2048 --prompt_max_len 2048 --seed 7
        --dataset owner/prompts --dataset_probs 1.0 --input_key context_messages --apply_chat_template --flash_attn
        --temperature 0.9 --zero_stage 0 --best_of_n 4 --enable_prefix_caching --max_num_seqs 64 --iter 2
        --rollout_batch_size 10240 --output_path ./generate.jsonl --max_samples 100000""",
        {"best_of_n": 4, "iter": 2, "rollout_batch_size": 10240, "temperature": 0.9, "max_num_seqs": 64},
    ),
    (
        "generate",
        """--eval_task rm --pretrain owner/judge --bf16 --max_len 4096 --dataset owner/answers --dataset_probs 1.0
        --zero_stage 0 --post_processor rs --micro_batch_size 4 --output_path ./rm.jsonl""",
        {"eval_task": "rm", "post_processor": "rs", "max_len": 4096, "micro_batch_size": 4},
    ),
    (
        "generate",
        """--eval_task rm --pretrain owner/judge --dataset owner/answers --input_key question --output_key response
        --post_processor csft --normalize_reward --reward_template '{input} <rm_score>: {reward} '
        --value_prefix_head value_head --output_path ./csft.jsonl""",
        {"normalize_reward": True, "reward_template": "{input} <rm_score>: {reward} "},
    ),
    (
        "chat",
        "--pretrain owner/policy --bf16 --apply_chat_template --temperature 0.5 --enable_csft --csft_prompt good",
        {"temperature": 0.5, "condition": "good", "top_p": 0.9},
    ),
]

RL_OFTEN = """--pretrain owner/policy --prompt_data owner/prompts --input_key context_messages --apply_chat_template
    --save_path ./final --zero_stage 3 --bf16 --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024
    --max_samples 100000 --train_batch_size 128 --gradient_checkpointing"""
WITH_REWARD_MODEL = f"{RL_OFTEN} --reward_pretrain owner/judge --normalize_reward"
ALONE = "--ref_num_nodes 1 --reward_num_nodes 1 --actor_num_nodes 1"
SPREAD = f"{ALONE} --ref_num_gpus_per_node 1 --reward_num_gpus_per_node 1 --actor_num_gpus_per_node 4"
HYBRID = """--colocate_all_models --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.5
    --vllm_sync_backend nccl --enforce_eager --vllm_enable_sleep --deepspeed_enable_sleep"""
PACKED = "--packing_samples has no effect in RL: samples are always packed"
BUILT_IN = "the built-in engine writes the answers, with the policy's own weights: --vllm_num_engines set aside"
HYBRID_NOTES = [
    PACKED,
    "--save_hf_ckpt has no effect without --save_steps, unless the run is stopped",
    BUILT_IN.replace(
        "engines set",
        "engines, --vllm_tensor_parallel_size, --vllm_gpu_memory_utilization, --vllm_sync_backend set",
    ),
]


def shared(processes: int, asked: int, *roles: str) -> str:
    flags = ", ".join(f"--{role}_num_gpus_per_node" for role in roles)
    return f"all models share {processes} processes, on as many of the {asked} GPUs that are asked for: {flags}"


KEY_AND_CKPT = "--use_wandb token --ckpt_path ./ckpt/rlhf --save_hf_ckpt"

# (words, what they mean, GPUs they ask for, notes)
RL_COMMANDS = [
    (
        f"""{WITH_REWARD_MODEL} {ALONE} --critic_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_gpus_per_node 8
        --critic_num_gpus_per_node 8 --actor_num_gpus_per_node 8 {HYBRID} --micro_train_batch_size 8
        --micro_rollout_batch_size 16 --rollout_batch_size 1024 --n_samples_per_prompt 1 --actor_learning_rate 5e-7
        --critic_learning_rate 9e-6 --init_kl_coef 0.01 --packing_samples {KEY_AND_CKPT}""",
        {"advantage_estimator": "gae", "packing_samples": True, "nproc": 8, "normalize_reward": True},
        8,
        HYBRID_NOTES,
    ),
    (
        f"""{WITH_REWARD_MODEL} {HYBRID} --micro_train_batch_size 8 --micro_rollout_batch_size 16
        --rollout_batch_size 1024 --n_samples_per_prompt 1 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6
        --init_kl_coef 0.01 --packing_samples {KEY_AND_CKPT}""",
        {"actor_learning_rate": 5e-7, "nproc": 8, "use_wandb": "token"},
        8,
        HYBRID_NOTES,
    ),
    (
        f"""{WITH_REWARD_MODEL} {ALONE} --critic_num_nodes 1 --ref_num_gpus_per_node 2 --reward_num_gpus_per_node 2
        --critic_num_gpus_per_node 2 --actor_num_gpus_per_node 2 --vllm_num_engines 2 --vllm_tensor_parallel_size 2
        --colocate_critic_reward --colocate_actor_ref --micro_train_batch_size 16 --micro_rollout_batch_size 32
        --rollout_batch_size 1024 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01
        --packing_samples --adam_offload --flash_attn --use_wandb token""",
        {"n_samples_per_prompt": 1, "adam_offload": True, "nproc": 2},
        8,
        [
            PACKED,
            shared(2, 8, "actor", "ref", "critic", "reward"),
            BUILT_IN.replace("engines set", "engines, --vllm_tensor_parallel_size set"),
        ],
    ),
    (
        f"""{WITH_REWARD_MODEL} {SPREAD} --vllm_num_engines 2 --vllm_tensor_parallel_size 1
        --micro_train_batch_size 16 --micro_rollout_batch_size 32 --rollout_batch_size 128 --n_samples_per_prompt 1
        --actor_learning_rate 5e-7 --init_kl_coef 0.01 --advantage_estimator reinforce --packing_samples
        --adam_offload --flash_attn --use_wandb token""",
        {"advantage_estimator": "reinforce", "rollout_batch_size": 128},
        8,
        [PACKED, shared(4, 8, "actor", "ref", "reward"), BUILT_IN],
    ),
    (
        f"""{WITH_REWARD_MODEL} {SPREAD} --vllm_num_engines 2 --micro_train_batch_size 2 --micro_rollout_batch_size 8
        --rollout_batch_size 1024 --n_samples_per_prompt 1 --advantage_estimator reinforce --actor_learning_rate 3e-7
        --init_kl_coef 1e-4 --adam_offload --packing_samples --save_steps -1 --ckpt_path ./ckpt/rlhf""",
        {"init_kl_coef": 1e-4, "micro_train_batch_size": 2},
        8,
        [PACKED, shared(4, 8, "actor", "ref", "reward"), BUILT_IN],
    ),
    (
        f"""{WITH_REWARD_MODEL} {ALONE} --ref_num_gpus_per_node 2 --reward_num_gpus_per_node 2
        --actor_num_gpus_per_node 8 --vllm_num_engines 4 --vllm_tensor_parallel_size 1 --micro_train_batch_size 2
        --micro_rollout_batch_size 8 --rollout_batch_size 1024 --n_samples_per_prompt 4 --init_kl_coef 1e-3 --gamma 1.0
        --use_kl_loss --kl_estimator k3 --advantage_estimator group_norm --actor_learning_rate 5e-8 --save_steps -1""",
        {"advantage_estimator": "group_norm", "use_kl_loss": True, "kl_estimator": "k3", "n_samples_per_prompt": 4},
        16,
        [shared(8, 16, "actor", "ref", "reward"), BUILT_IN],
    ),
    (
        f"{RL_OFTEN} --remote_rm_url ./reward_func.py --label_key answer",
        {"remote_rm_url": "./reward_func.py", "label_key": "answer", "reward_pretrain": None},
        1,
        [],
    ),
    (
        f"{RL_OFTEN} --remote_rm_url http://localhost:5000/get_reward --n_samples_per_prompt 4 --init_kl_coef 0 "
        "--advantage_estimator dr_grpo",
        {"advantage_estimator": "dr_grpo", "init_kl_coef": 0},
        1,
        [],
    ),
    (
        f"""{RL_OFTEN} --remote_rm_url ./reward_func.py --advantage_estimator reinforce_baseline
        --n_samples_per_prompts 4 --dynamic_filtering --dynamic_filtering_reward_range 0.01 0.99
        --rollout_micro_batch_size 16""",
        {"n_samples_per_prompt": 4, "dynamic_filtering_reward_range": (0.01, 0.99), "micro_rollout_batch_size": 16},
        1,
        [],
    ),
]

OF_EACH = " ".join(
    f"--{role}_num_nodes 1 --{role}_num_gpus_per_node 8" for role in ("actor", "ref", "reward", "critic")
)
OF_70B = " ".join(f"--{role}_num_nodes 2 --{role}_num_gpus_per_node 8" for role in ("actor", "ref", "reward", "critic"))
ALL_SHARE = {role: "those of actor" for role in ("reference", "critic", "reward", "engines")}

# The same commands, and others that the documents describe in words, on a cluster: (words, who has which devices).
RAY_COMMANDS = [
    (RL_COMMANDS[0][0], {"actor": "8 devices", **ALL_SHARE}),
    (RL_COMMANDS[1][0], {"actor": "8 devices", **ALL_SHARE}),
    (
        RL_COMMANDS[2][0],
        {
            **{"actor": "2 devices", "reference": "those of actor", "critic": "2 devices"},
            **{"reward": "those of critic", "engines": "2 x 2 devices"},
        },
    ),
    *[
        (words, {"actor": "4 devices", "reference": "1 device", "reward": "1 device", "engines": "2 x 1 device"})
        for words, *_ in RL_COMMANDS[3:5]
    ],
    (
        RL_COMMANDS[5][0],
        {"actor": "8 devices", "reference": "2 devices", "reward": "2 devices", "engines": "4 x 1 device"},
    ),
    (RL_COMMANDS[6][0], {"actor": "1 device", "reference": "those of actor", "critic": "those of actor"}),
    (RL_COMMANDS[7][0], {"actor": "1 device"}),
    (RL_COMMANDS[8][0], {"actor": "1 device", "reference": "those of actor"}),
    # Every model on devices of its own.
    (
        f"{WITH_REWARD_MODEL} {OF_EACH} --vllm_num_engines 4 --vllm_tensor_parallel_size 2",
        {**{role: "8 devices" for role in ("actor", "reference", "critic", "reward")}, "engines": "4 x 2 devices"},
    ),
    # 70B on 48: a third for the engines, a third for the policy, a third for the critic.
    (
        f"""{WITH_REWARD_MODEL} {OF_70B} --colocate_actor_ref --colocate_critic_reward --vllm_num_engines 4
        --vllm_tensor_parallel_size 4 --adam_offload --enable_prefix_caching --n_samples_per_prompt 4""",
        {
            **{"actor": "16 devices", "reference": "those of actor", "critic": "16 devices"},
            **{"reward": "those of critic", "engines": "4 x 4 devices"},
        },
    ),
    # Several reward models, whose rewards are added up.
    (
        f"{RL_OFTEN} --reward_pretrain owner/judge,owner/judge {OF_EACH} --colocate_all_models --vllm_num_engines 8",
        {"actor": "8 devices", **ALL_SHARE},
    ),
    # A reward server beside a hybrid engine, and no engines at all.
    (
        f"""{RL_OFTEN} --remote_rm_url http://localhost:5000/get_reward,http://localhost:5000/get_reward
        --actor_num_nodes 1 --actor_num_gpus_per_node 8 --colocate_all_models --vllm_num_engines 8
        --advantage_estimator rloo --n_samples_per_prompt 4""",
        {"actor": "8 devices", "reference": "those of actor", "engines": "those of actor"},
    ),
    (
        f"{WITH_REWARD_MODEL} {SPREAD} --vllm_num_engines 0 --advantage_estimator reinforce_baseline "
        "--n_samples_per_prompt 4 --use_kl_loss --kl_estimator k2",
        {"actor": "4 devices", "reference": "1 device", "reward": "1 device"},
    ),
]


@pytest.mark.parametrize("words, expected, gpus, notes", RL_COMMANDS)
def test_documented_rl_commands_pass_the_checks_where_there_are_enough_gpus(
    words, expected, gpus, notes, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward_func.py").write_text("def reward_func(queries, prompts, labels): ...\n")
    monkeypatch.setattr("trimtab.config.resolved_config.find_spec", lambda module: object())
    options, warnings = settle(parse(PPOOptions, shlex.split(words)))
    warnings += check(options)
    refuse_unimplemented(options)
    assert {name: getattr(options, name) for name in expected} == expected
    assert warnings == notes
    assert hardware_problems(options, lambda: gpus) == []
    assert len(hardware_problems(options, lambda: gpus - 1)) == (gpus > 1)


@pytest.mark.parametrize(
    "verb, words, expected", [*((name.split()[-1], *case) for name, case in COMMANDS.items()), *OTHERS]
)
def test_documented_commands_are_understood_and_pass_the_checks(verb, words, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, warnings = settle(parse(JOBS[verb], shlex.split(words)))
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
        (KTOOptions, "--num_train_epochs 3 --dataset_name a/b", {"max_epochs": 3, "dataset": "a/b"}),
        (PPOOptions, "--max_epoch 3 --value_prefix_head head", {"max_epochs": 3, "value_head_prefix": "head"}),
        (PPOOptions, "--num_train_epochs 3 --dataset_name a/b", {"num_episodes": 3, "prompt_data": "a/b"}),
        (PPOOptions, "--num_generations 4 --epsilon 0.1", {"n_samples_per_prompt": 4, "eps_clip": 0.1}),
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
