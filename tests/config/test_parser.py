import os
import shlex
import threading
from pathlib import Path

import pytest

from tests.cli.test_sft_documents import ASCEND, CHINESE, GUIDE, KEY, words_of
from tests.config import every_job
from trimtab.config.jobs import JOBS, SFTOptions
from trimtab.config.parser import parse, parse_values
from trimtab.config.resolved_config import settle, to_yaml
from trimtab.config.rl_jobs import TailOptions
from trimtab.errors import UserError


def refusal(*argv: str) -> str:
    return every_job.refusal(parse, SFTOptions, argv)


def config(tmp_path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_documented_commands_are_understood():
    guide, readme, documentation = (parse(SFTOptions, words_of(text)) for text in (ASCEND, CHINESE, GUIDE))
    assert (guide.max_len, guide.output_key, guide.save_steps, guide.bf16) == (2048, "response", -1, True)
    assert (readme.max_len, readme.packing_samples, readme.load_checkpoint) == (4096, True, True)
    assert (readme.use_wandb, readme.train_batch_size, guide.flash_attn) == (KEY, 256, False)
    assert (documentation.micro_train_batch_size, documentation.learning_rate) == (8, 5e-6)
    assert documentation.input_template == "User: {}\nAssistant: "


SEVERAL = "--adam_betas 0.8 0.99 --target_modules q_proj k_proj v_proj --bf16"


@pytest.mark.parametrize(
    "words, expected",
    [
        # A switch stands alone, or takes True or False.
        *((words, {"bf16": True}) for words in ("--bf16", "--bf16 --multiturn", "--bf16 True")),
        ("--bf16 --bf16=false", {"bf16": False}),
        *(
            (f"--max_ckpt_mem {text}", {"max_ckpt_mem": value})
            for text, value in (("1e8", 10**8), ("500_000", 500_000))
        ),
        (SEVERAL, {"adam_betas": (0.8, 0.99), "target_modules": ("q_proj", "k_proj", "v_proj")}),
        # The word None unsets.
        *((f"--{name} None", {name: None}) for name in ("input_template", "train_max_tokens_per_gpu")),
        # As launchers write it.
        *((f"--local_rank{between}3", {"local_rank": 3}) for between in "= "),
        *((f"--use_wandb {word}", {"use_wandb": "True"}) for word in ("", "true")),
        ("--use_wandb False", {"use_wandb": None}),
        ("--use_wandb offline", {"use_wandb": "offline"}),
        # The last of repeated options wins, under any of its names.
        ("--max_len 1 --max_len 2 --max_epochs 5 --max_epoch 6", {"max_len": 2, "max_epochs": 6}),
        ("--train_split half --max-len 9", {"dataset_split": "half", "max_len": 9}),
        ("--input-template=a-{}", {"input_template": "a-{}"}),
        # Negative and odd values reach their option.
        ("--save_steps -1 --input_template '-- {}'", {"save_steps": -1, "input_template": "-- {}"}),
        ("--wandb_group=--x", {"wandb_group": "--x"}),
    ],
)
def test_words_mean_what_people_write_them_for(words, expected):
    options = parse(SFTOptions, shlex.split(words))
    found = {name: getattr(options, name) for name in expected}
    assert found == expected and [*map(type, found.values())] == [*map(type, expected.values())]


def test_a_number_cannot_be_unset():
    assert "a whole number" in refusal("--max_len", "None")


@pytest.mark.parametrize("text, value", [("-1e1", -10.0), ("-1.5e-3", -0.0015), ("-.5e2", -50.0), ("-2.", -2.0)])
def test_a_negative_number_may_be_written_in_several_ways(text, value):
    assert parse(TailOptions, ["--target_dist_beta", text, "--bf16"]).target_dist_beta == value
    assert parse(TailOptions, ["--reward_clip_range", text, "1e4"]).reward_clip_range == (value, 1e4)


@pytest.mark.parametrize("word", ["-x", "-e1", "-x1"])
def test_a_word_with_one_dash_is_no_value(word):
    assert refusal("--max_len", "8", word).startswith(f"unknown option {word}")
    assert refusal("--max_len", word) == "--max_len: expected one argument"


@pytest.mark.parametrize(
    "word, meant",
    [("--learning_rat", "learning_rate"), ("--max_epohc", "max_epochs"), ("--warmup", "lr_warmup_ratio")],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(word, meant):
    assert refusal(word, "1") == f"unknown option {word}; did you mean --{meant}?"


def test_a_prefix_is_not_an_option():
    assert "did you mean --learning_rate?" in refusal("--learning", "1")


def test_an_unknown_option_like_no_other_points_to_help():
    assert refusal("--xyzzy") == "unknown option --xyzzy; trimtab sft --help all lists them"


def test_a_key_behind_a_misspelt_option_is_not_repeated():
    assert "s3cr3t" not in refusal("--use-wandbb=s3cr3t")


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--max_len", "long"], "--max_len: takes a whole number, not 'long'"),
        (["--max_len", "1.5"], "--max_len: takes a whole number, not '1.5'"),
        (["--max_len", "inf"], "--max_len: takes a whole number, not 'inf'"),
        (["--learning_rate", "nan"], "--learning_rate: takes a number, not 'nan'"),
        (["--bf16", "maybe"], "--bf16: takes True or False, not 'maybe'"),
        (["--max_epoch", "x"], "--max_epochs: takes a whole number, not 'x'"),
        (["--adam_betas", "0.9"], "--adam_betas: expected 2 arguments"),
        (["--max_len"], "--max_len: expected one argument"),
        (["--target_modules"], "--target_modules: expected at least one argument"),
    ],
)
def test_a_wrong_value_is_refused_by_name(argv, expected):
    assert refusal(*argv) == expected


def test_words_that_belong_to_no_option_are_refused():
    assert refusal("rows.jsonl").startswith("unexpected 'rows.jsonl'")
    assert refusal("--dataset", "a", "b").startswith("unexpected 'b'")


def test_the_command_line_wins_over_the_file(tmp_path):
    path = config(tmp_path, "max_len: 64\nbf16: true\nmax_epochs: 4\n")
    options = parse(SFTOptions, ["--max_len", "32", "--config", path, "--bf16", "False"])
    assert (options.max_len, options.bf16, options.max_epochs) == (32, False, 4)


def test_the_file_reads_what_people_write(tmp_path):
    path = config(
        tmp_path,
        "learning_rate: 5e-6\nmax_ckpt_mem: 1e8\nmax_norm: 2\nadam_betas: [0.8, 0.9]\ntarget_modules: q_proj\n"
        "input_template: null\nuse_wandb: true\nwandb_group: 7\nmax_epoch: 3\nl2: 1.0e-2\noutput_key: None\n",
    )
    options = parse(SFTOptions, ["--config", path])
    assert (options.learning_rate, options.max_ckpt_mem, options.max_norm, options.l2) == (5e-6, 10**8, 2.0, 0.01)
    assert (options.adam_betas, options.target_modules) == ((0.8, 0.9), ("q_proj",))
    assert (options.input_template, options.output_key, options.use_wandb) == (None, None, "True")
    assert (options.wandb_group, options.max_epochs) == ("7", 3)


def test_an_empty_file_changes_nothing(tmp_path):
    assert parse(SFTOptions, ["--config", config(tmp_path, "# nothing\n")]) == SFTOptions()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("seed: 1\nlearning_rat: 1\n", "line 2: unknown option learning_rat; did you mean learning_rate?"),
        ("optimiser:\n  l2: 1\n", "(options are not nested)"),
        ("max_len: long\n", "line 1: max_len takes a whole number, not 'long'"),
        ("max_len: true\n", "line 1: max_len takes a whole number, not True"),
        ("max_len: null\n", "line 1: max_len takes a whole number, not None"),
        ("bf16: 3\n", "line 1: bf16 takes True or False, not 3"),
        ("dataset: [a, b]\n", "line 1: dataset takes text, not ['a', 'b']"),
        ("dataset: true\n", "line 1: dataset takes text, not True"),
        ("adam_betas: [0.9]\n", "line 1: adam_betas takes a list of 2 values"),
        ("target_modules: []\n", "line 1: target_modules takes a list of one or more values"),
        ("max_len: 1\n\nmax_len: 2\n", "line 3: max_len is set twice"),
        ("max_epochs: 1\nmax_epoch: 2\n", "line 2: max_epochs is set twice"),
        ("dry_run: true\n", "line 1: dry_run belongs on the command line"),
        ("seed: 1\nbf16: [true\nl2: 0\n", "line 3: not valid YAML"),
        ("seed: 1\n\tbf16: true\n", "line 2: not valid YAML"),
        ("- seed\n", "line 1: a config holds lines of the form"),
        ("use_wandb: [s3cr3t]\n", "line 1: use_wandb takes text, not what is there"),
    ],
)
def test_a_mistake_in_the_file_is_refused_with_file_and_line(tmp_path, text, expected):
    path = config(tmp_path, text)
    line = refusal("--config", path)
    assert path in line and expected in line and "s3cr3t" not in line


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    missing = str(tmp_path / "none.yaml")
    assert refusal("--config", missing) == f"--config {missing}: No such file or directory"
    assert "directory" in refusal("--config", str(tmp_path))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x80")
    assert "UTF-8" in refusal("--config", str(tmp_path / "bytes.yaml"))
    (tmp_path / "deep.yaml").write_text("seed: " + "[" * 1000 + "]" * 1000 + "\n")
    assert "nested too deeply" in refusal("--config", str(tmp_path / "deep.yaml"))


def test_a_config_of_another_verb_is_refused(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(to_yaml(parse(JOBS["grpo"], ["--pretrain", "m", "--prompt_data", "d"])))
    with pytest.raises(UserError, match="is of trimtab grpo, not of trimtab ppo: use that verb, or trimtab rl"):
        parse(JOBS["ppo"], ["--config", str(path)])
    assert parse(JOBS["rl"], ["--config", str(path)]).advantage_estimator == "group_norm"
    assert parse(JOBS["grpo"], ["--config", str(path)]).advantage_estimator == "group_norm"
    meant = ["--config", str(path), "--advantage_estimator", "reinforce"]
    assert parse(JOBS["reinforce"], meant).advantage_estimator == "reinforce"


def test_a_config_whose_estimator_is_not_the_verbs_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("advantage_estimator: group_norm\n")
    with pytest.raises(UserError, match="says advantage_estimator: group_norm, and trimtab ppo is gae"):
        parse(JOBS["ppo"], ["--config", str(path)])
    words = ["--config", str(path), "--advantage_estimator", "group_norm"]
    assert parse(JOBS["ppo"], words).advantage_estimator == "group_norm"
    path.write_text("advantage_estimator: dr_grpo\n")
    assert parse(JOBS["grpo"], ["--config", str(path)]).advantage_estimator == "dr_grpo"
    path.write_text(to_yaml(parse(JOBS["rl"], ["--pretrain", "m", "--advantage_estimator", "group_norm"])))
    with pytest.raises(UserError, match="says advantage_estimator: group_norm, and trimtab ppo is gae"):
        parse(JOBS["ppo"], ["--config", str(path)])
    assert parse(JOBS["grpo"], ["--config", str(path)]).advantage_estimator == "group_norm"


def test_a_config_may_come_through_a_pipe(tmp_path):
    resolved = to_yaml(parse(JOBS["sft"], ["--pretrain", "m", "--dataset", "d", "--seed", "7"]))
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(resolved,), daemon=True)
    writer.start()
    options = parse(JOBS["sft"], ["--config", str(path)])
    assert options.given == {"config", "pretrain", "dataset", "seed"}, "what is at its default is nobody's wish"


@pytest.mark.parametrize(
    "values, words",
    [
        ({"max_len": 9}, ["--max_len", "9"]),
        ({"learning_rate": "5e-6", "bf16": True}, ["--learning_rate", "5e-6", "--bf16"]),
        ({"adam_betas": (0.9, 0.99)}, ["--adam_betas", "0.9", "0.99"]),
        ({"save_path": Path("out")}, ["--save_path", "out"]),
        ({"per_device_train_batch_size": 2}, ["--per_device_train_batch_size", "2"]),
        ({"input_template": None}, ["--input_template", "None"]),
    ],
)
def test_values_in_python_mean_what_the_words_of_a_command_mean(values, words):
    by_values, by_words = parse_values(SFTOptions, values), parse(SFTOptions, words)
    assert by_values == by_words and by_values.given == by_words.given


@pytest.mark.parametrize("values", [{"learning_rat": 1}, {"max_len": "x"}, {"bf16": "perhaps"}, {"adam_betas": (0.9,)}])
def test_a_wrong_value_in_python_names_the_option(values):
    with pytest.raises(UserError, match=f"--{next(iter(values))}"):
        parse_values(SFTOptions, values)


def test_an_option_under_two_names_is_set_twice():
    with pytest.raises(UserError, match="--micro_train_batch_size is set twice, once as per_device_train_batch_size"):
        parse_values(SFTOptions, {"micro_train_batch_size": 2, "per_device_train_batch_size": 2})


def test_a_runs_own_file_brings_no_wish_for_a_name_that_nobody_gave(tmp_path):
    named, unnamed = {"wandb_run_name": "mine"}, {}
    for number, wish in enumerate((named, unnamed)):
        settled, _ = settle(parse_values(SFTOptions, {"pretrain": "owner/model", "dataset": "owner/data", **wish}))
        file = tmp_path / f"{number}.yaml"
        file.write_text(to_yaml(settled))
        assert ("wandb_run_name" in parse_values(SFTOptions, {"config": file}).given) is bool(wish)
