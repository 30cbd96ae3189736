import dataclasses
import gzip
import inspect

import pytest

from tests.config import every_job
from trimtab.config.jobs import SFTOptions
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, settle
from trimtab.config.rl_jobs import PPOOptions, TailOptions
from trimtab.config.training_options import SCHEDULERS


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def options(**changes) -> SFTOptions:
    return SFTOptions(**{"pretrain": "owner/model", "dataset": "owner/data", **changes})


def refusal(**changes) -> str:
    return every_job.refusal(check, options(**changes))


def test_plain_options_pass_without_a_word():
    assert check(options()) == []


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"pretrain": None}, "--pretrain is missing"),
        ({"dataset": None}, "--dataset is missing"),
        ({"dataset": " , "}, "names no source"),
        ({"learning_rate": -1e-5}, "--learning_rate is -1e-05: it must be at least 0"),
        ({"lr_warmup_ratio": 1.5}, "--lr_warmup_ratio is 1.5: it must be between 0 and 1"),
        ({"min_lr_ratio": -0.1}, "--min_lr_ratio"),
        ({"l2": -1.0}, "--l2"),
        ({"max_norm": -1.0}, "--max_norm"),
        ({"adam_betas": (0.9, 1.0)}, "--adam_betas has 1"),
        ({"max_len": 0}, "--max_len is 0: it must be at least 1"),
        ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps is 0: it must be above 0"),
        ({"nproc": 0}, "--nproc is 0: it must be above 0"),
        ({"max_samples": 0}, "--max_samples"),
        ({"max_epochs": 0}, "--max_epochs"),
        ({"num_workers": 0}, "--num_workers"),
        ({"aux_loss_coef": -1.0}, "--aux_loss_coef"),
        ({"save_steps": 0}, "--save_steps is 0: it must be a number of steps above 0, or -1"),
        ({"eval_steps": -2}, "--eval_steps"),
        ({"logging_steps": 0}, "--logging_steps"),
        ({"max_ckpt_num": 0}, "--max_ckpt_num"),
        ({"lora_rank": -1}, "--lora_rank"),
        ({"lora_dropout": 1.0}, "--lora_dropout"),
        ({"zero_stage": 4}, "--zero_stage is 4"),
        ({"grad_accum_dtype": "fp16"}, "--grad_accum_dtype is fp16"),
        ({"load_in_4bit": True, "lora_rank": 8}, "add --bf16"),
        ({"load_in_4bit": True, "bf16": True}, "add --lora_rank"),
        ({"multiturn": True, "pretrain_mode": True}, "choose one"),
        ({"train_max_tokens_per_gpu": 4096}, "add --packing_samples"),
        ({"train_max_tokens_per_gpu": 100, "packing_samples": True}, "cannot hold one sample of --max_len 2048"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes, expected):
    assert expected in refusal(**changes)


def test_batch_sizes_that_do_not_divide_are_refused_with_two_ways_out():
    assert refusal(train_batch_size=128, micro_train_batch_size=12) == (
        "--train_batch_size 128 is not a multiple of --micro_train_batch_size 12: "
        "use --micro_train_batch_size 8, or --train_batch_size 120"
    )
    assert refusal(train_batch_size=4).endswith("use --micro_train_batch_size 4")


@pytest.mark.parametrize("whole, micro", [(128, 12), (7, 3), (4, 8), (30, 13)])
def test_the_ways_out_of_undivided_batches_work(whole, micro):
    advice = refusal(train_batch_size=whole, micro_train_batch_size=micro).split(": use ")[1]
    for way in advice.split(", or "):
        flag, number = way.split()
        sizes = {"train_batch_size": whole, "micro_train_batch_size": micro, flag[2:]: int(number)}
        assert check(options(**sizes)) == []


def test_scheduler_names_are_those_of_transformers_that_need_no_further_argument():
    transformers = pytest.importorskip("transformers.optimization")
    needs_rate = {"cosine_with_min_lr"}  # its floor is our --min_lr_ratio
    for name in SCHEDULERS:
        schedule = transformers.TYPE_TO_SCHEDULER_FUNCTION[transformers.SchedulerType(name)]
        required = {
            parameter.name
            for parameter in inspect.signature(schedule).parameters.values()
            if parameter.default is inspect.Parameter.empty
        }
        assert required <= {"optimizer", "num_warmup_steps", "num_training_steps"} or name in needs_rate
    assert ", ".join(SCHEDULERS) in refusal(lr_scheduler="wsd")


@pytest.mark.parametrize("shares", ["0.5", "0.5,x", "0.5,-0.1", "0,0", "0.5,nan", "0.5,", "1,2,3"])
def test_shares_must_fit_the_sources(shares):
    assert "--dataset_probs" in refusal(dataset="owner/one,owner/two", dataset_probs=shares)


def test_shares_that_fit_pass():
    assert check(options(dataset="owner/one, owner/two", dataset_probs="3, 1")) == []


@pytest.mark.parametrize(
    "source", ["rows.jsonl", "./rows", "/no/such/rows", "~/no-such-rows", "a/b/c", "data/rows.parquet", "json@nowhere"]
)
@pytest.mark.parametrize("name", ["dataset", "eval_dataset"])
def test_a_local_source_that_does_not_exist_is_refused(source, name):
    line = refusal(**{name: f"owner/name,{source}"})
    assert f"--{name}" in line and source in line


@pytest.mark.parametrize("source", ["name", "owner/name", "Owner/name-1.5b_v2", "owner/name@folder"])
def test_a_hub_name_is_not_taken_for_a_path(source):
    assert check(options(dataset=source, eval_dataset=source, pretrain=source.split("@")[0])) == []


def test_local_sources_that_exist_pass(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "rows.jsonl").write_text("{}\n")
    assert check(options(dataset=f"rows.jsonl,./many,json@many,{tmp_path}/rows.jsonl", pretrain="./many")) == []


@pytest.mark.parametrize("flag", ["dataset", "pretrain"])
def test_a_name_missing_from_an_existing_folder_is_a_warning_because_it_may_be_a_hub_name(tmp_path, flag):
    (tmp_path / "runs").mkdir()
    (warning,) = check(options(**{flag: "runs/sft"}))
    assert warning == f"--{flag}: there is no sft in the folder runs, so runs/sft is taken for a hub name"


def test_a_model_folder_that_does_not_exist_is_refused():
    assert refusal(pretrain="./no/such/model") == "--pretrain: ./no/such/model does not exist; check the path"


def test_a_template_without_a_place_for_the_prompt_is_left_out_with_a_warning():
    settled, warnings = settle(options(input_template="Question:"))
    assert settled.input_template is None
    assert len(warnings) == 1 and "{}" in warnings[0]


def test_settling_fills_the_run_name_and_the_place_of_checkpoints_and_nothing_else():
    settled, warnings = settle(options())
    assert settled.wandb_run_name.startswith("sft_20") and warnings == []
    assert settled.ckpt_path == "./ckpt/checkpoints"
    assert dataclasses.replace(settled, wandb_run_name=None, ckpt_path=None) == options()
    assert settle(settled)[0] == settled


def test_a_written_backslash_n_in_the_template_is_a_warning():
    (warning,) = check(options(input_template="User: {}\\nAssistant:"))
    assert "new line" in warning
    assert check(options(input_template="User: {}\nAssistant:")) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_alpha": 32},
        {"target_modules": ("q_proj",)},
        {"gradient_checkpointing_use_reentrant": True},
        {"eval_split": "test"},
        {"wandb_group": "g"},
        {"min_lr_ratio": 0.2, "lr_scheduler": "linear"},
    ],
)
def test_an_option_without_effect_is_a_warning(changes):
    (warning,) = check(options(**changes))
    assert f"--{next(iter(changes))} has no effect without" in warning


@pytest.mark.parametrize("changes", [{"lora_alpha": 32}, {"lora_dropout": 0.1}, {"target_modules": ("c_attn",)}])
def test_options_of_adapters_have_an_effect_on_those_of_a_proposal(changes):
    given = {"pretrain": "owner/model", "prompt_data": "owner/prompts", "reward_pretrain": "owner/judge", **changes}
    assert check(TailOptions(**given, proposal_lora_rank=4)) == []
    assert check(TailOptions(**given)) == [f"--{next(iter(changes))} has no effect without --lora_rank"]


def test_checkpoints_that_would_save_nothing_are_a_warning():
    (warning,) = check(options(save_steps=5, disable_ds_ckpt=True))
    assert "saves nothing" in warning
    assert check(options(save_steps=5, disable_ds_ckpt=True, save_hf_ckpt=True)) == []


@pytest.mark.parametrize(
    "words, step, told",
    [
        ("--per_device_train_batch_size 4", 4, "a step is 4 samples: 4 in a pass x 1 passes x 1 processes"),
        (
            "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --nproc 3",
            24,
            "a step is 24 samples: 4 in a pass x 2 passes x 3 processes",
        ),
        (
            "--per_device_train_batch_size 4 --train_batch_size 128",
            128,
            "a step stays 128 samples, as --train_batch_size says; a pass takes 4",
        ),
        ("--micro_train_batch_size 4", 128, None),
    ],
)
def test_a_step_in_words_per_device_is_as_large_as_its_parts(words, step, told):
    options, lines = settle(parse(SFTOptions, words.split()))
    assert (options.train_batch_size, options.micro_train_batch_size) == (step, 4)
    assert lines == ([told] if told else [])


def test_a_step_in_words_per_device_counts_the_gpus_that_the_policy_asks_for():
    words = "--per_device_train_batch_size 4 --actor_num_gpus_per_node 4"
    options, lines = settle(parse(PPOOptions, words.split()))
    assert (options.train_batch_size, options.nproc) == (16, 4)
    assert lines == ["a step is 16 samples: 4 in a pass x 1 passes x 4 processes"]


@pytest.mark.parametrize(
    "content", [b"", b" \n", gzip.compress(b"\n", mtime=0)], ids=["empty", "blank", "gzip of a blank line"]
)
def test_a_data_file_without_rows_is_refused(tmp_path, content):
    file = tmp_path / ("rows.jsonl.gz" if content[:2] == b"\x1f\x8b" else "rows.jsonl")
    file.write_bytes(content)
    assert refusal(dataset=str(file)) == f"{file} is empty: it holds no rows"


def test_a_damaged_archive_is_left_to_what_reads_it(tmp_path):
    (tmp_path / "rows.jsonl.gz").write_bytes(b"no archive")
    assert check(options(dataset=str(tmp_path / "rows.jsonl.gz"))) == []
