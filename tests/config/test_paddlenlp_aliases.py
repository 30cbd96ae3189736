"""PaddleNLP's files: every key of its guide means what the specification of its behaviour says, or is refused."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.config.every_job import refusal
from trimtab.config.job_file import read_command, with_config
from trimtab.config.option import options_of
from trimtab.config.paddlenlp_aliases import KEYS, table
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, settle, settled_and_checked, to_yaml
from trimtab.config.rl_jobs import AnyRLOptions, GRPOOptions
from trimtab.errors import UserError

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "paddlenlp"

# The keys that PaddleNLP's guide explains one by one, and those that its recipe files have besides.
GUIDE = """rl_algorithm actor_model_name_or_path reward_model_name_or_path use_rm_server reward_server logging_dir
    logging_steps output_dir report_to wandb_http_proxy run_name train_datasets eval_datasets prompt_key response_key
    dataloader_drop_last balance_batch use_remove_padding tensor_parallel_degree sequence_parallel
    sharding_parallel_degree sharding sharding_parallel_config pipeline_parallel_degree virtual_pp_degree max_prompt_len
    max_dec_len min_dec_len top_p temperature repetition_penalty rollout_max_num_seqs rollout_quant_type seed
    global_batch_size global_mini_batch_size rollout_n update_iters per_device_logprob_batch_size
    per_device_reward_batch_size per_device_value_batch_size per_device_train_batch_size num_train_epochs max_length
    learning_rate lr_scheduler_type weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm max_steps save_steps
    ignore_save_lr_and_optim kl_coeff kl_loss_coeff pg_loss_coeff entropy_coeff clip_range_ratio clip_range_ratio_low
    clip_range_ratio_high clip_range_score clip_range_value normalize_reward normalize_advantage use_fp32_compute
    do_eval per_device_eval_batch_size evaluation_strategy eval_steps use_flash_attention use_fused_rms_norm recompute
    recompute_granularity bf16 fp16_opt_level amp_custom_black_list amp_custom_white_list"""
RECIPES = """dataloader_shuffle use_fused_rope global_gen_batch_size dynamic_sampling max_gen_batches
    overlong_reward_buffer overlong_penalty_factor enable_overlong_reward_buffer offload_level offload_optim"""

LEAST = """
rl_algorithm: {method}
actor_model_name_or_path: owner/policy
train_datasets: owner/prompts
use_rm_server: true
reward_server: http://127.0.0.1:8731
report_to: none
rollout_n: 4
"""


@pytest.fixture
def read(tmp_path):
    """The options that a file with these lines asks for, beside the least that a file needs."""

    def read(lines: str = "", words: str = "", method: str = "grpo", least: str = LEAST) -> AnyRLOptions:
        path = tmp_path / "file.yaml"
        kept = [line for line in least.format(method=method).splitlines() if line.split(":")[0] not in _names(lines)]
        path.write_text("\n".join([*kept[1:], *lines.splitlines()]))
        return parse(AnyRLOptions, ["--config", str(path), *words.split()])

    return read


def _names(lines: str) -> set[str]:
    return {line.split(":")[0] for line in lines.splitlines() if line}


def of_example(name: str, words: str = "") -> AnyRLOptions:
    return parse(AnyRLOptions, ["--config", str(FILES / f"{name}.yaml"), *words.split()])


def holds(options: AnyRLOptions, **expected) -> None:
    assert {name: getattr(options, name) for name in expected} == expected


def test_every_documented_key_is_in_the_table():
    assert not {*GUIDE.split(), *RECIPES.split()} - KEYS.keys()


def test_every_option_that_the_table_names_exists():
    named = {name for key in KEYS.values() for name in re.findall(r"--(\w+)", key.here)}
    assert named and not named - options_of(AnyRLOptions).keys()


def test_the_page_has_the_table():
    assert table() in (ROOT / "docs" / "paddlenlp.md").read_text(), "put the text of paddle_keys.table() there"


def test_the_recipe_of_grpo():
    holds(
        of_example("grpo_argument"),
        **{"advantage_estimator": "group_norm", "pretrain": "Qwen/Qwen2.5-7B-Instruct-1M"},
        **{"remote_rm_url": "http://127.0.0.1:8731", "reward_pretrain": None, "use_visualdl": "vdl_log"},
        **{"prompt_data": "ppo-kk/34567ppl/train.jsonl", "eval_dataset": "ppo-kk/5ppl/test.jsonl"},
        **{"input_key": "src", "label_key": "tgt", "apply_chat_template": False, "drop_last": True, "no_shuffle": True},
        **{"ds_tensor_parallel_size": 2, "zero_stage": 1, "shard_size": None, "truncate_prompts": True},
        **{"prompt_max_len": 512, "generate_max_len": 4096, "generate_min_len": 32, "max_len": None},
        **{"temperature": 0.7, "top_p": 1.0, "repetition_penalty": 1.0, "rollout_slots": 32},
        **{"rollout_batch_size": 8, "n_samples_per_prompt": 8, "train_batch_size": 64, "max_epochs": 1},
        **{"micro_train_batch_size": 8, "micro_logprob_batch_size": 8, "micro_value_batch_size": None},
        **{"max_steps": 3600, "save_steps": 300, "eval_steps": 20, "logging_steps": 1, "num_episodes": 3600},
        **{"actor_learning_rate": 5e-7, "lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "l2": 0.01},
        **{"adam_betas": (0.9, 0.999), "adam_eps": 1e-8, "max_norm": 1.0, "seed": 42, "bf16": True},
        **{"init_kl_coef": 0.001, "use_kl_loss": True, "kl_estimator": "k3", "kl_clip": 10.0},
        **{"policy_loss_coef": 1.0, "entropy_loss_coef": 0.0, "eps_clip": 0.2, "eps_clip_low_high": None},
        **{"eval_temperature": 0.0, "eval_n_samples_per_prompt": 1, "gradient_checkpointing": True},
        **{"save_hf_ckpt": True, "disable_ds_ckpt": True, "ref_reward_offload": True, "adam_offload": False},
        **{"overlong_buffer_len": None, "dynamic_filtering": False, "running_reward_norm": False},
    )


def test_the_recipe_of_reinforce_plus_plus():
    holds(
        of_example("reinforce_plus_plus_argument"),
        **{"advantage_estimator": "reinforce", "init_kl_coef": 0.001, "use_kl_loss": False, "kl_estimator": "k1"},
        **{"reward_clip_range": (-10.0, 10.0), "kl_clip": None, "gamma": 1.0, "n_samples_per_prompt": 8},
    )


def test_the_recipe_of_32b_counts_four_updates_of_a_rollout_as_four_steps():
    options = of_example("grpo_32b_argument", "--nproc 8")
    holds(
        options,
        **{"rollout_batch_size": 64, "train_batch_size": 128, "micro_train_batch_size": 2, "adam_offload": True},
        **{"max_steps": 250, "save_steps": 125, "eval_steps": 25, "num_episodes": 250, "no_shuffle": False},
    )
    assert options.notes[-1] == (
        "gradient accumulation 32: 16 prompts x 8 answers / 2 in a pass / 2 data-parallel processes"
    )


@pytest.mark.parametrize(("processes", "passes"), [(1, 8), (4, 2)])
def test_the_accumulation_is_that_of_the_processes_of_a_launcher(read, monkeypatch, processes, passes):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    notes = read("global_batch_size: 16\nglobal_mini_batch_size: 8\nper_device_train_batch_size: 4").notes
    assert f"gradient accumulation {passes}: 8 prompts x 4 answers / 4 in a pass / {processes} data" in notes[-1]


def test_keys_that_are_absent_take_paddlenlp_s_defaults(read):
    holds(
        read(),
        **{"lr_scheduler": "linear", "actor_learning_rate": 5e-5, "lr_warmup_ratio": 0.0, "bf16": False},
        **{"temperature": 1.0, "generate_max_len": 512, "init_kl_coef": 0.001, "zero_stage": 0, "drop_last": False},
        **{"gradient_checkpointing": False, "eval_dataset": None, "train_batch_size": 32, "rollout_batch_size": 8},
        **{"max_ckpt_num": 1_000_000, "save_steps": 500, "save_hf_ckpt": False, "use_visualdl": None},
        **{"input_key": "src", "no_shuffle": False},
    )


def test_yaml_s_texts_flags_and_lists_are_read(read):
    lines = """learning_rate: 5e-7\nmax_steps: "40"\nbf16: "True"\nevaluation_strategy: no\neval_datasets: owner/test
report_to: [tensorboard, wandb]\nlogging_dir: logs\nwandb_http_proxy: http://proxy:1\nrun_name: 7
sharding: stage2 offload\nkl_coeff:\nreward_model_name_or_path: ""\nrecompute: yes"""
    holds(
        read(lines),
        **{"actor_learning_rate": 5e-7, "max_steps": 40, "bf16": True, "eval_dataset": None, "use_wandb": "True"},
        **{"use_tensorboard": "logs", "wandb_http_proxy": "http://proxy:1", "wandb_run_name": "7"},
        **{"use_visualdl": None},
        **{"zero_stage": 2, "adam_offload": True, "gradient_checkpointing": True},
    )


def test_a_json_file_says_the_same(tmp_path):
    entries = yaml.safe_load((FILES / "grpo_argument.yaml").read_text())
    (tmp_path / "grpo_argument.json").write_text(json.dumps({**entries, "learning_rate": 5e-7}, indent=2))
    told = parse(AnyRLOptions, ["--config", str(tmp_path / "grpo_argument.json")])
    assert told == of_example("grpo_argument") and told.actor_learning_rate == 5e-7


@pytest.mark.parametrize(
    ("lines", "words", "expected"),
    [
        (
            *("learning_rate: 1e-6\nseed: 3\nbf16: true", "--actor_learning_rate 1e-3 --seed 7 --bf16 False"),
            {"actor_learning_rate": 1e-3, "seed": 7, "bf16": False, "pretrain": "owner/policy"},
        ),
        ("max_steps: 8\nupdate_iters: 2", "--max_epochs 1", {"max_epochs": 1, "max_steps": 8}),
        (
            *("do_eval: true\nevaluation_strategy: steps\neval_steps: 7", "--eval_dataset owner/test"),
            {"eval_dataset": "owner/test", "eval_steps": 7, "eval_temperature": 0.0},
        ),
        ("use_rm_server: false", "--reward_verifier kk", {"reward_verifier": "kk", "remote_rm_url": None}),
    ],
)
def test_the_command_line_wins_in_our_words(read, lines, words, expected):
    holds(read(lines, words), **expected)


@pytest.mark.parametrize(
    ("method", "lines", "expected"),
    [
        ("grpo", "clip_range_score: 3", {"kl_clip": 3.0, "reward_clip_range": (-1e9, 1e9), "kl_estimator": "k3"}),
        ("grpo", "kl_loss_coeff: 0", {"init_kl_coef": 0.0, "use_kl_loss": False, "kl_clip": None}),
        ("grpo", "normalize_reward: true", {"running_reward_norm": False}),
        ("reinforce_plus_plus", "clip_range_score: 3", {"kl_clip": None, "reward_clip_range": (-3.0, 3.0)}),
        ("reinforce_plus_plus", "kl_coeff: 0.05", {"init_kl_coef": 0.05, "use_kl_loss": False, "kl_estimator": "k1"}),
        ("reinforce_plus_plus", "normalize_reward: true", {"running_reward_norm": True}),
        ("ppo", "clip_range_value: 2", {"value_clip": 2.0, "advantage_estimator": "gae", "lambd": 1.0}),
        ("ppo", "learning_rate: 2e-6", {"critic_learning_rate": 2e-6, "init_kl_coef": 0.02}),
        ("ppo", "critic_learning_rate: 1e-5\nper_device_value_batch_size: 3", {"micro_value_batch_size": 3}),
        ("grpo", "clip_range_ratio_high: 0.28", {"eps_clip_low_high": (0.2, 0.28)}),
        ("grpo", "clip_range_ratio: 0.1", {"eps_clip": 0.1, "eps_clip_low_high": None}),
        ("grpo", "clip_range_ratio_low: 0", {"eps_clip_low_high": (0.0, 0.2)}),
        ("grpo", "save_total_limit: 2", {"max_ckpt_num": 2}),
        ("grpo", "recompute: true\nrecompute_granularity: full_attn", {"gradient_checkpointing_keep": "products"}),
        ("grpo", "dynamic_sampling: true\nmax_gen_batches: 3", {"dynamic_filtering_batches": 3}),
        ("grpo", "dynamic_sampling: true", {"dynamic_filtering": True, "dynamic_filtering_rule": "differing"}),
        ("grpo", "max_gen_batches: 3", {"dynamic_filtering": False, "dynamic_filtering_batches": None}),
        ("grpo", "dynamic_sampling: true\nglobal_gen_batch_size: 24", {"vllm_generate_batch_size": 24}),
        ("grpo", "enable_overlong_reward_buffer: true", {"overlong_buffer_len": 256, "overlong_penalty_factor": 1.0}),
        ("grpo", "rollout_quant_type: weight_only_int8", {"weight_only_int8": True}),
        ("grpo", "update_iters: 2\nmax_steps: 9\nsave_steps: 4", {"max_epochs": 2, "max_steps": 5, "save_steps": 2}),
        ("grpo", "num_train_epochs: 3", {"num_episodes": 3, "max_steps": -1}),
        (
            "grpo",
            "use_rm_server: false\nreward_model_name_or_path: owner/judge",
            {"remote_rm_url": None, "label_key": None},
        ),
        ("grpo", "sharding: stage2\nsharding_parallel_degree: 4", {"zero_stage": 2, "shard_size": 4}),
        ("grpo", "sharding: stage1\nsharding_parallel_degree: 1", {"zero_stage": 0, "shard_size": None}),
        ("grpo", "recompute: true\nrecompute_granularity: core_attn", {"gradient_checkpointing_keep": "products"}),
        ("grpo", "do_eval: true\neval_datasets: owner/test", {"eval_dataset": "owner/test", "eval_steps": -1}),
        ("grpo", "offload_level: freeze_model optimizer", {"ref_reward_offload": True, "deepspeed_enable_sleep": True}),
        ("grpo", "bf16: true\nfp16_opt_level: O2", {"bf16": True}),
        ("grpo", "lr_scheduler_type: cosine\nlearning_rate: 1e-6\nmin_learning_rate: 1e-7", {"min_lr_ratio": 0.1}),
        ("grpo", "max_steps: 100\nwarmup_steps: 10", {"lr_warmup_ratio": 0.1}),
        ("grpo", "save_strategy: no", {"save_steps": -1}),
    ],
)
def test_keys_that_are_read_together(read, method, lines, expected):
    holds(
        read(lines, method=method),
        **{name: pytest.approx(v) if type(v) is float else v for name, v in expected.items()},
    )


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("use_fused_rms_norm: true\nFLAGS_set_to_1d: false", "use_fused_rms_norm, FLAGS_set_to_1d: Paddle's kernels"),
        ("amp_custom_black_list: [sin, cos]", "amp_custom_black_list: nothing is cast"),
        (
            "tensor_parallel_degree: 2\nsequence_parallel: true",
            "sequence_parallel: layers that are cut keep whole rows",
        ),
        ("balance_batch: false", "balance_batch false: always done here"),
        ("kl_coeff: 0.1", "kl_coeff is not grpo's, which has kl_loss_coeff"),
        ("normalize_advantage: true", "normalize_advantage is off in grpo"),
        ("max_length: 768\nmax_prompt_len: 256", "max_length 768 is max_prompt_len + max_dec_len"),
        ("critic_learning_rate: 1e-5", "critic_learning_rate: grpo has no critic"),
        ("do_eval: true", "nothing is evaluated: there are no eval_datasets"),
        ("num_train_epochs: 6\nmax_steps: 5", "max_steps 5 says how long"),
        (
            "update_iters: 2\nmax_steps: 5",
            "2 updates as a step: logging_steps 1, save_steps 500, max_steps 5 are 1, 250, 3",
        ),
        ("report_to: visualdl\nreward_model_name_or_path: owner/judge", "owner/judge is not used"),
    ],
)
def test_what_has_no_meaning_or_another_one_is_said(read, lines, told):
    assert [note for note in read(lines).notes if told in note], read(lines).notes


def test_nothing_but_the_accumulation_is_said_of_a_file_without_oddities(read):
    (note,) = read(
        "sequence_parallel: true\nbalance_batch: true\nmax_length: 4609\nmax_prompt_len: 4096\nmax_dec_len: 512"
    ).notes
    assert note.startswith("gradient accumulation")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("rl_algorithm: vapo", "rl_algorithm vapo: it must be one of grpo, reinforce_plus_plus, ppo"),
        ("pipeline_parallel_degree: 2", "pipeline_parallel_degree 2: there are no pipelines here"),
        ("virtual_pp_degree: 4", "virtual_pp_degree 4: there are no pipelines here"),
        ("fp16: true", "fp16 true: use bf16"),
        ("fp16_opt_level: O2", "fp16_opt_level O2: O2 needs bf16: true"),
        (
            "max_length: 600\nmax_prompt_len: 128",
            "max_length 600: it must be above max_prompt_len + max_dec_len, which is 640",
        ),
        ("rollout_quant_type: fp8", "rollout_quant_type fp8: it must be weight_only_int8 or empty"),
        ("sharding: stage4", "sharding stage4: stage4 is none of"),
        ("report_to: mlflow", "report_to mlflow: mlflow is none of"),
        ("recompute: true\nrecompute_granularity: half", "recompute_granularity half: it must be one of"),
        ("num_train_epochs: -1", "num_train_epochs -1.0: give a whole number of at least 1, or max_steps"),
        ("use_rm_server: false", "reward_model_name_or_path is missing: use_rm_server is false"),
        ("learning_rate: fast", "learning_rate takes a number, not 'fast'"),
        ("rollout_n: 2.5", "rollout_n takes a whole number, not '2.5'"),
        ("bf16: maybe", "bf16 takes True or False, not 'maybe'"),
        ("seed: 1\nseed: 2", "seed is set twice in this file"),
        ("do_train: false", "do_train false: this command trains"),
        ("global_batch_size: 0", "global_batch_size 0: it must be at least 1"),
        ("per_device_logprob_batch_size: -1", "per_device_logprob_batch_size -1: it must be at least 1"),
        ("save_steps: 0", "save_steps 0: it must be at least 1"),
        ("offload_level: eval", "offload_level eval: eval is none of freeze_model, train_model, optimizer"),
        ("lr_scheduler_type: cosine\nmin_learning_rate: 0\nlearning_rate: 0", "learning_rate 0.0: it must be above 0"),
        ("max_steps: 9\ndecay_steps: 5", "decay_steps 5: the rate falls until the run ends, at max_steps, which is 9"),
        ("rolout_n: 8", "unknown key rolout_n of PaddleNLP; did you mean rollout_n?"),
        ("mini_batch_size: 8", "unknown key mini_batch_size of PaddleNLP; did you mean global_mini_batch_size?"),
        ("lora_rank: 8", "lora_rank is an option of ours in a file of PaddleNLP: put --lora_rank on the command line"),
        ("zzz: 8", "unknown key zzz of PaddleNLP; docs/paddlenlp.md lists them"),
    ],
)
def test_what_cannot_be_meant_is_one_line_with_its_place(read, tmp_path, lines, told):
    message = refusal(read, lines)
    assert told in message and message.startswith(str(tmp_path / "file.yaml"))
    name = lines.splitlines()[-1].split(":")[0]
    written = (tmp_path / "file.yaml").read_text().splitlines()
    number = max(i for i, line in enumerate(written, 1) if line.split(":")[0] == name)
    if "is missing" not in told and "max_prompt_len" not in lines:
        assert f"line {number}: " in message


@pytest.mark.parametrize(
    ("lines", "words", "told"),
    [
        ("rollout_n: 1", "", "lines 1, {}: rl_algorithm, rollout_n: --advantage_estimator group_norm compares"),
        (
            "global_mini_batch_size: 3",
            "",
            " line {}: global_mini_batch_size, per_device_train_batch_size (absent): --train_batch_size 12 is not a",
        ),
        ("rollout_n:", "", "lines 1, {}: rl_algorithm, rollout_n: --advantage_estimator group_norm compares"),
        ("top_p: 1.5", "", " line {}: top_p: --top_p is 1.5"),
        ("lr_scheduler_type: foo", "", " line {}: lr_scheduler_type: --lr_scheduler is foo"),
        (
            "min_dec_len: 600",
            "",
            " line {}: min_dec_len, max_dec_len (absent): --generate_min_len 600 is more than --generate_max_len 512",
        ),
        ("max_steps: 5\nwarmup_steps: 10", "", " line {}: warmup_steps: --lr_warmup_ratio is 2"),
        ("actor_model_name_or_path:", "", " line {}: actor_model_name_or_path: --pretrain is missing"),
        ("top_p: 0.9", "--top_p 1.5", "--top_p is 1.5"),
    ],
)
def test_what_our_checks_refuse_is_told_with_the_keys_of_the_file(read, tmp_path, lines, words, told):
    line = refusal(settled_and_checked, read(lines, words))
    last = len((tmp_path / "file.yaml").read_text().splitlines())
    assert line.startswith(told.format(last) if words else f"{tmp_path / 'file.yaml'} {told.format(last).strip()}")


def test_a_key_that_is_to_be_added_is_named(read, tmp_path):
    line = refusal(settled_and_checked, read(least=LEAST.replace("rollout_n: 4\n", "")))
    told = f"{tmp_path / 'file.yaml'} line 1: rl_algorithm, rollout_n (absent): --advantage_estimator group_norm"
    assert line.startswith(told)


@pytest.mark.parametrize(
    "name",
    ["rollout_batch_size", "n_samples_per_prompt", "max_epochs", "micro_train_batch_size", "ring_attn_size"],
)
def test_a_size_of_nothing_on_the_command_line_is_refused_as_without_a_file(read, name):
    with pytest.raises(UserError, match=f"--{name}.* 0"):
        check(settle(read(words=f"--{name} 0"))[0])


def test_what_is_derived_follows_the_command_line(read):
    options = read("rollout_n: 4\nglobal_batch_size: 8\nmax_steps: 8\nupdate_iters: 2", "--n_samples_per_prompt 2")
    holds(options, n_samples_per_prompt=2, train_batch_size=16, max_steps=4)
    assert options.notes[-1].startswith("gradient accumulation 2: 8 prompts x 2 answers / 8 in a pass / 1")


def test_a_reward_of_the_command_line_takes_the_place_of_the_file_s(read):
    options = read("", "--reward_verifier kk")
    holds(options, reward_verifier="kk", remote_rm_url=None)
    assert [note for note in options.notes if "is not asked: --reward_verifier of the command line" in note]


def test_the_critic_cannot_have_a_schedule_of_its_own(read):
    with pytest.raises(UserError, match=r"critic_weight_decay 0\.1: the critic shares the policy's weight_decay"):
        read("critic_weight_decay: 0.1", method="ppo")


def test_a_file_of_paddlenlp_belongs_to_trimtab_rl():
    with pytest.raises(UserError, match="is PaddleNLP's: use trimtab rl"):
        parse(GRPOOptions, ["--config", str(FILES / "grpo_argument.yaml")])


@pytest.mark.parametrize("name", ["grpo_argument", "reinforce_plus_plus_argument", "grpo_32b_argument"])
def test_the_resolved_config_of_a_paddlenlp_file_is_one_of_ours(tmp_path, name):
    options, _ = settle(of_example(name, "--nproc 8"))
    (tmp_path / "resolved.yaml").write_text(to_yaml(options))
    again = parse(AnyRLOptions, ["--config", str(tmp_path / "resolved.yaml"), "--nproc", "8"])
    assert settle(again)[0] == options and again.notes == ()
    assert not check(of_example(name, "--nproc 8 --prompt_data owner/prompts --eval_dataset owner/test"))


def test_a_key_on_the_command_line_is_told_in_our_words():
    with pytest.raises(UserError, match=r"unknown option --rl_algorithm; PaddleNLP's rl_algorithm is --advantage_est"):
        parse(AnyRLOptions, ["--rl_algorithm", "grpo"])
    with pytest.raises(UserError, match=r"unknown option --logging_dir; logging_dir is a key of PaddleNLP's file"):
        parse(AnyRLOptions, ["--logging_dir", "logs"])


def test_run_rl_takes_the_file_as_its_first_word():
    assert with_config(["a.yaml", "--seed", "1"]) == ["--config", "a.yaml", "--seed", "1"]
    assert with_config(["--config", "a.yaml"]) == ["--config", "a.yaml"]
    command = read_command(["torchrun", "-m", "trimtab.cli.run_rl", "a.yaml"], {"rl": "trimtab.cli.train_rl"})
    assert command.module == "trimtab.cli.train_rl" and command.words() == ["--config", "a.yaml"]
