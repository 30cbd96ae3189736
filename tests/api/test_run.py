import os
import signal
from pathlib import Path

import pytest
import torch

import trimtab
from tests.api.digits import early_digits
from tests.api.small import RL, SFT, same_weights


def stop_after_the_first(row):
    if row["step"] == 1:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "out"
    return trimtab.grpo(task / "model", task / "prompts.jsonl", early_digits, save_path=folder, lora_rank=2, **RL)


def test_a_run_is_read_from_its_folder(run):
    again = trimtab.open(run.path)
    assert again.finished and again.job == "grpo" and again.options == run.options
    assert [row["step"] for row in again.metrics] == [1, 2] and isinstance(again.alarms, list)
    of_second = list(again.rollouts(step=2))
    assert of_second and {row["step"] for row in of_second} == {2} and len(of_second) < len(list(again.rollouts()))
    assert again.report() == run.path / "report.html"


def test_a_run_shows_itself_in_a_line_and_in_a_notebook(run):
    assert "grpo, finished after 2 iterations" in repr(run) and "reward " in repr(run) and "\n" not in repr(run)
    page = run._repr_html_()
    assert "<polyline" in page and "Reward" in page and "http" not in page and "<script" not in page


def test_an_adapter_comes_on_its_base_and_merged_says_the_same(run):
    ids = torch.tensor([run.tokenizer()("sort 21>")["input_ids"]])
    adapted, merged = run.model(), run.model(merged=True)
    assert type(adapted).__name__ == "PeftModelForCausalLM" and type(merged).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_folder_without_a_run_is_one_line(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(trimtab.UserError, match="give the save_path= of a run"):
            trimtab.open(folder)


def test_ctrl_c_saves_and_the_run_goes_on_to_the_same_weights(task):
    places = {"save_path": "stopped", "model": task / "model", "data": task / "rows.jsonl"}
    with pytest.raises(trimtab.Interrupted, match=r"trimtab.open\('stopped'\).resume\(\) goes on"):
        trimtab.sft(**places, on_iteration=stop_after_the_first, **SFT)
    stopped = trimtab.open("stopped")
    assert not stopped.finished and len(stopped.metrics) == 1 and "not finished after 1 step," in repr(stopped)
    with pytest.raises(trimtab.UserError, match="has no whole model yet"):
        stopped.model()
    whole = stopped.resume()
    assert whole.finished and len(whole.metrics) == 2
    straight = trimtab.sft(task / "model", task / "rows.jsonl", **SFT)
    assert same_weights(whole.path, straight.path)


def test_a_run_that_a_function_rewarded_wants_it_again(task):
    options = {**RL, "label_key": None, "save_path": "out", "on_iteration": stop_after_the_first}
    with pytest.raises(trimtab.Interrupted):
        trimtab.grpo(task / "model", ["sort 12>"] * 4, early_and_short, **options)
    with pytest.raises(trimtab.UserError, match=r"give it again, as resume\(reward=...\)"):
        trimtab.open("out").resume()
    with pytest.raises(trimtab.UserError, match="on_iteration takes a function"):
        trimtab.open("out").resume(reward=early_and_short, on_iteration=5)
    with pytest.raises(trimtab.RunFailed, match="ZeroDivisionError") as raised:
        trimtab.open("out").resume(reward=lambda queries, prompts, labels: 1 / 0)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert trimtab.open("out").resume(reward=early_and_short).finished
    with pytest.raises(trimtab.UserError, match="unknown argument sed; did you mean seed="):
        trimtab.open("out").resume(reward=early_and_short, sed=1)


def early_and_short(queries, prompts, labels):
    return [1.0 / len(query) for query in queries]


def test_a_finished_run_without_checkpoints_does_not_begin_anew(run):
    with pytest.raises(trimtab.UserError, match="has no checkpoint to go on from"):
        trimtab.open(run.path).resume()
    assert run.finished and not list(Path(run.path.parent).glob("*.old*"))
