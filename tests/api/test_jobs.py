"""A function is its command: the same weights, the same words, with objects in the place of files."""

import inspect
import threading
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import trimtab
from tests.api.digits import early_digits
from tests.api.small import RL, SFT, same_weights, words_of
from tests.report.pages import read_lines as rows
from tests.tiny import tiny_model
from trimtab.cli.main import VERBS
from trimtab.cli.main import main as command
from trimtab.config.jobs import TRAINED


def test_sft_by_command_and_by_function_gives_the_same_weights(task):
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    seen = []
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    run = trimtab.sft(model, rows(task / "rows.jsonl"), tokenizer=tokenizer, on_iteration=seen.append, **SFT)
    places = ["--pretrain", f"{task}/model", "--dataset", f"{task}/rows.jsonl", "--save_path", "by_command"]
    assert command(["sft", *places, *words_of(SFT)]) == 0
    assert same_weights(run.path, Path("by_command"))
    assert not same_weights(run.path, task / "model")
    assert run.path == Path("runs/sft-1").resolve() and run.finished
    assert seen == run.metrics and [row["step"] for row in seen] == [1, 2]


def test_grpo_by_command_and_by_function_gives_the_same_weights(task):
    run = trimtab.grpo(task / "model", rows(task / "prompts.jsonl"), early_digits, save_path="by_function", **RL)
    places = ["--pretrain", f"{task}/model", "--prompt_data", f"{task}/prompts.jsonl", "--save_path", "by_command"]
    function = f"{inspect.getsourcefile(early_digits)}:early_digits"
    assert command(["grpo", *places, "--reward_func", function, *words_of(RL)]) == 0
    assert same_weights(run.path, Path("by_command"))
    assert not same_weights(run.path, task / "model")
    assert {row["prompt"] for row in run.rollouts()} and run.options.reward_func == "given:early_digits"


def test_a_call_from_another_thread_trains(task):
    runs = []
    thread = threading.Thread(target=lambda: runs.append(trimtab.sft(task / "model", task / "rows.jsonl", **SFT)))
    thread.start()
    thread.join()
    assert runs[0].finished


@pytest.mark.parametrize("verb", TRAINED)
def test_every_training_job_has_its_function_with_help(verb):
    function = getattr(trimtab, verb)
    assert verb in VERBS and f"trimtab.options({verb!r})" in function.__doc__
    taken = inspect.signature(function).parameters.keys()
    assert {"model", "tokenizer", "save_path", "resume", "on_iteration"} <= taken


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"learning_rat": 1}, "unknown argument learning_rat; did you mean learning_rate=?"),
        ({"max_len": "x"}, "max_len: takes a whole number, not 'x'"),
        ({"max_len": [1]}, "max_len: takes a whole number, not [1]"),
        ({"max_epochs": 0}, "max_epochs is 0: it must be at least 1"),
        ({"model": "no/such/folder/at/all"}, "model: no/such/folder/at/all does not exist; check the path"),
        ({"attn_implementation": "flash_attention_2", "load_in_4bit": True}, "add bf16=True"),
    ],
)
def test_a_mistake_is_told_in_the_words_of_the_call(wrong, told, task):
    given = {"model": f"{task}/model", **SFT, **wrong}
    with pytest.raises(trimtab.UserError) as raised:
        trimtab.sft(data=rows(task / "rows.jsonl"), **given)
    assert str(raised.value).endswith(told) and "--" not in str(raised.value)
    assert not Path("runs").exists()


def test_all_unknown_arguments_are_told_at_once_with_what_they_are_called_here(task):
    strange = {"train_dataset": ["a"], "reward_funcs": [len], "args": object(), "processing_class": object(),
               "learning_rate": 1e-6, "epsilon_high": 0.28, "temprature": 1.0, "data": "x"}  # fmt: skip
    with pytest.raises(trimtab.UserError) as raised:
        trimtab.grpo(f"{task}/model", **strange)
    told = str(raised.value).split("; ")
    assert told == [
        f"unknown arguments {', '.join(strange)}",
        "TRL's train_dataset is prompts= here",
        "TRL's reward_funcs becomes reward=[FUNCTION, 'VERIFIER', ...] here",
        "TRL's args becomes its fields as arguments of the call here",
        "TRL's processing_class becomes tokenizer= here",
        "TRL's learning_rate is actor_learning_rate= here",
        "TRL's epsilon_high becomes eps_clip_low_high=(0.2, 0.28) here",
        "temprature: did you mean temperature=?",
        "data: did you mean prompts=?",
    ]


def test_a_loaded_model_under_an_unknown_name_is_told_with_the_others(task):
    told = "unknown arguments ref_model, args; TRL's ref_model is reference= here"
    with pytest.raises(trimtab.UserError, match=told):
        trimtab.dpo(f"{task}/model", "rows.jsonl", ref_model=tiny_model("llama"), args=None)


def test_a_folder_that_cannot_be_one_is_told(task):
    for place, words in (("", "save_path is empty"), (task / "rows.jsonl", "cannot write there")):
        with pytest.raises(trimtab.UserError, match=words):
            trimtab.sft(f"{task}/model", rows(task / "rows.jsonl"), save_path=place, **SFT)


def test_a_model_that_is_not_causal_is_refused_in_the_words_of_the_command(task, capsys):
    from transformers import BertConfig, BertModel

    words = AutoTokenizer.from_pretrained(task / "model")
    config = BertConfig(vocab_size=len(words), hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                        intermediate_size=8)  # fmt: skip
    BertModel(config).save_pretrained("bert")
    words.save_pretrained("bert")
    with pytest.raises(trimtab.Error) as raised:
        trimtab.sft("bert", task / "rows.jsonl", **SFT)
    assert command(["sft", "--pretrain", "bert", "--dataset", f"{task}/rows.jsonl", *words_of(SFT)]) == 2
    by_the_command = f"trimtab sft: error: {raised.value}\n".replace("model=bert", "--pretrain bert")
    assert capsys.readouterr().err.endswith(by_the_command)
    assert not Path("runs").exists()


def needs_a_column(prompts, completions, answer):
    return [0.0 for _ in completions]


def test_a_reward_that_needs_a_column_which_is_not_there_is_refused_before_the_model_is_loaded(task, monkeypatch):
    monkeypatch.setattr("trimtab.train.rl.roles.load_policy", lambda *_: pytest.fail("the model is loaded"))
    for reward, told in ((needs_a_column, "needs the column answer, and the train data have input, label"),
                         ("exact", r"\(found: input, label\)")):  # fmt: skip
        with pytest.raises(trimtab.UserError, match=told):
            trimtab.grpo(task / "model", task / "prompts.jsonl", reward, **{**RL, "label_key": None})
    assert not Path("runs").exists()


def broken(prompts, completions, **columns):
    return [1 / 0]


def test_a_reward_that_raises_is_told_with_its_line_and_brings_its_own_exception(task):
    with pytest.raises(trimtab.RunFailed) as raised:
        trimtab.grpo(task / "model", task / "prompts.jsonl", broken, save_path="out", **RL)
    line = inspect.getsourcelines(broken)[1] + 1
    told = str(raised.value)
    assert f"{__file__}: broken failed on row 0 (prompt " in told and f"division by zero (line {line})" in told
    assert "trimtab.open('out').resume() goes on" in told and "--load_checkpoint" not in told
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert "argparse" not in "".join(entry.path.name for entry in raised.traceback)


def test_what_is_refused_late_leaves_nothing_and_an_earlier_run_where_it_was(task):
    Path("out").mkdir()
    (Path("out") / "manifest.json").write_text("{}")
    (Path("out") / "config.json").write_text("{}")  # a finished run
    with pytest.raises(trimtab.UserError, match="compares the answers to one prompt"):
        trimtab.grpo(task / "model", ["sort 1>"], early_digits, save_path="out", **{**RL, "n_samples_per_prompt": 1})
    assert sorted(path.name for path in Path("out").iterdir()) == ["config.json", "manifest.json"]
    assert not list(Path().glob("out.old*"))


def test_a_function_is_not_sent_to_other_processes_and_the_way_out_is_told(task):
    for how in ({"nproc": 2}, {"ray": True}):
        with pytest.raises(trimtab.UserError, match=r"write it to a file and give FILE.py:early_digits") as raised:
            trimtab.grpo(task / "model", task / "prompts.jsonl", early_digits, **RL, **how)
        assert "\n" not in str(raised.value)
    with pytest.raises(trimtab.UserError, match="on_iteration would be called in another process"):
        trimtab.sft(task / "model", task / "rows.jsonl", nproc=2, on_iteration=print, **SFT)


def test_a_dry_run_tells_what_would_happen_and_leaves_no_folder(task, capsys):
    trimtab.sft(task / "model", rows(task / "rows.jsonl"), dry_run=True, **SFT)
    assert "8 rows give 2 steps" in capsys.readouterr().out
    assert not Path("runs").exists()


def test_no_error_tells_a_key(task, monkeypatch):
    key = "0123456789abcdef0123456789abcdef01234567"

    def refuse(*arguments):
        raise trimtab.RunFailed(f"wandb refused {key}")

    monkeypatch.setattr("trimtab.config.resolved_config.find_spec", lambda module: object())
    monkeypatch.setattr("trimtab.api.run.start_job", refuse)
    with pytest.raises(trimtab.RunFailed, match="wandb refused <redacted>"):
        trimtab.sft(task / "model", task / "rows.jsonl", use_wandb=key, **SFT)


@pytest.mark.parametrize("name", ["ppo", "dapo", "reinforce", "rloo", "rl"])
def test_functions_of_rl_take_and_say_the_same(name):
    """They are written out for editors; this keeps them alike."""
    function, other = getattr(trimtab, name), trimtab.grpo
    assert inspect.signature(function) == inspect.signature(other)
    said, expected = (each.__doc__.partition("Args:")[2].partition("save_path")[0] for each in (function, other))
    assert said == expected and "environment" in said
