"""What rewards read of the prompts' rows, checked before there is a model."""

import dataclasses
import textwrap
from types import SimpleNamespace

import pytest
from datasets import Dataset

from trimtab.config.jobs import GenerateOptions
from trimtab.config.rl_jobs import GRPOOptions, PPOOptions
from trimtab.data.prompts import build_prompt_dataset
from trimtab.distributed.device import find_device
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.errors import UserError
from trimtab.rewards import build
from trimtab.rewards.build import check_columns
from trimtab.rewards.functions import register_functions
from trimtab.rewards.signatures import read_signature

TEXT = {"input_key": "input", "input_template": None, "apply_chat_template": False, "prompt_max_len": 40}
GRPO = GRPOOptions(pretrain="owner/model", prompt_data="rows.jsonl")


def store_of(*rows, label_key=None):
    options = SimpleNamespace(**TEXT, label_key=label_key)
    return build_prompt_dataset(Dataset.from_list(list(rows)), make_tokenizer(), options)[0]


def refusal(store, what="train", options=GRPO, **changes):
    with pytest.raises(UserError) as caught:
        check_columns({what: store}, dataclasses.replace(options, **changes))
    return str(caught.value)


ROWS = store_of({"input": "sort 21>", "label": "12", "trimtab_source": "a.jsonl"})


@pytest.mark.parametrize("options", [GRPO, GenerateOptions(pretrain="owner/model", dataset="rows.jsonl")])
def test_a_verifier_without_a_column_of_labels_is_refused_with_the_columns_there_are(options):
    told = refusal(ROWS, options=options, reward_verifier="exact")
    assert told.startswith("--reward_verifier exact compares with a label, and 1 of 1 prompts of the train data have")
    assert told.endswith("name the column that holds it with --label_key (found: input, label)")
    labelled = store_of({"input": "sort 21>", "label": "12"}, label_key="label")
    check_columns({"train": labelled}, dataclasses.replace(options, reward_verifier="exact", label_key="label"))
    check_columns({"train": ROWS}, dataclasses.replace(options, reward_verifier="format,regex(^1)"))


def test_a_function_in_python_that_needs_a_column_is_refused():
    def needs(prompts, completions, answer, level): ...
    def labels(prompts, completions, label, completion_ids, log_metric): ...
    def may(prompts, completions, answer=None, *, level=3): ...
    def any_of_them(completions, **columns): ...

    functions = {function.__name__: function for function in (needs, labels, may, any_of_them)}
    with register_functions(functions):
        told = refusal(ROWS, "evaluation", reward_func="given:may,given:needs")
        check_columns(
            {"train": ROWS}, dataclasses.replace(GRPO, reward_func="given:labels,given:may,given:any_of_them")
        )
    assert told == (
        "the reward function needs needs the columns answer, level, and the evaluation data have input, label: rename "
        "the columns, or give the parameters a default"
    )


@pytest.mark.parametrize(
    "code, missing",
    [
        ("def f(prompts, completions, answer): ...", ["answer"]),
        ("async def f(prompts: Unknown, completions, *, answer, label, note=unknown()) -> Unknown: ...", ["answer"]),
        ("def f(prompts, completions, answer=unknown()): ...", []),
        ("def f(prompts, completions, **columns): ...", []),
        ("def f(prompts, completions, prompt): ...", ["prompt"]),  # which a function gets as prompts alone
        ("def reward_func(queries, prompts, labels, answer): ...", ["answer"]),
        ("def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...", []),
        ("def g(completions, answer): ...\ndef reward_func(queries, prompts, labels): ...", []),
    ],
)
def test_the_parameters_of_a_function_are_read_without_running_its_file(tmp_path, code, missing):
    (tmp_path / "reward.py").write_text(f"raise SystemExit\n{code}")
    assert read_signature(tmp_path / "reward.py").missing_parameters(["input", "label", "prompt"]) == missing


@pytest.mark.parametrize(
    "code",
    [
        "@cached\ndef f(prompts, completions, answer): ...",
        "def f(prompts, completions, answer): ...\nf = partial(f, answer=None)",
        "from elsewhere import *\ndef f(prompts, completions, answer): ...",
        "from elsewhere import reward_func\ndef f(prompts, completions, answer): ...",
        "if fast:\n    def f(prompts, completions): ...\ndef f(prompts, completions, answer): ...",
        "def f(prompts, completions, answer): ...\ndef g(prompts, completions, answer): ...",
        "def f(",
    ],
)
def test_what_a_file_makes_when_it_runs_is_not_guessed(tmp_path, code):
    (tmp_path / "reward.py").write_text(code)
    assert read_signature(tmp_path / "reward.py") is None


def test_a_function_of_a_file_that_gets_no_columns_says_how_to_get_them(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(textwrap.dedent("def reward_func(queries, prompts, labels, answer): ..."))
    assert refusal(ROWS, remote_rm_url=str(file)) == (
        f"the reward function {file} asks for answer, which a function of OpenRLHF's kind does not get: give the "
        "parameter a default, or take columns as f(prompts, completions, **columns)"
    )
    check_columns({"train": ROWS}, dataclasses.replace(GRPO, remote_rm_url=str(file), replay="recorded"))


@pytest.mark.parametrize(
    "changes, most",
    [
        ({"micro_rollout_batch_size": 5}, 5),
        ({"micro_rollout_batch_size": 5, "micro_reward_batch_size": 3}, 3),
        ({"micro_reward_batch_size": 3, "use_dynamic_batch": True}, None),
    ],
)
def test_a_pass_of_a_reward_model_has_its_own_size(monkeypatch, changes, most):
    made = []
    monkeypatch.setattr(build, "ModelReward", lambda name, *_, **settings: made.append(settings["max_samples"]))
    build._model("a/b", PPOOptions(**changes), find_device(), None)
    assert made == [most]


@pytest.mark.parametrize(
    "label, problem",
    [
        ({"test_list": ["assert add(1, 2) == 3"]}, ""),
        ({"inputs": ["1"], "outputs": ["1"]}, ""),
        ({"ground_truth": None}, "have none"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "neither test_list nor inputs with as many outputs"),
    ],
)
def test_labels_of_code_may_be_objects(label, problem):
    stores = {"train": store_of({"input": "sort 21>", "label": label}, label_key="label")}
    options = dataclasses.replace(GRPO, reward_verifier="code", label_key="label")
    if not problem:
        return check_columns(stores, options)
    with pytest.raises(UserError, match=problem):
        check_columns(stores, options)
