"""A whole attack on a model with a planted trigger: what is found and kept, and what an interruption changes."""

import json
import os
import signal

import pytest

from tests import warm
from tests.evaluate.planted import GOAL, TRIGGER, planted_policy
from trimtab.config.jobs import AttackOptions
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.errors import UserError
from trimtab.evaluate.gcg_attack import AttackRun, Search, Target, Vocabulary, attack_summary, output_of
from trimtab.rewards.types import RewardResult

TARGETS = [Target(GOAL, "y"), Target(GOAL, "n")]


class Judge:
    """Says -5 of a reply that begins with y and +1 of others, and keeps what it was shown."""

    name, concurrent = "judge", False

    def __init__(self):
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        return RewardResult([-5.0 if response.startswith("y") else 1.0 for response in request.responses])


def options_of(folder, **changes):
    settings = {
        **{"pretrain": "planted", "file_path": "goals.csv", "output_path": str(folder / "found.jsonl")},
        **{
            "gcg_optim_str_init": "xxxx",
            "gcg_steps": 8,
            "gcg_search_width": 64,
            "gcg_topk": 16,
            "gcg_use_prefix_cache": True,
        },
        **{"samples_per_prompt": 40, "max_new_tokens": 1, "reward_pretrain": "judge", "reward_threshold": -4.0},
    }
    return AttackOptions(**(settings | changes))


def attacked(folder, judge=None, **changes):
    run = AttackRun(options_of(folder, **changes), planted_policy(), make_tokenizer(), judge or Judge())
    return run.work_through(TARGETS)


def test_the_trigger_is_found_and_every_reward_is_kept(tmp_path):
    rows = attacked(tmp_path)
    assert [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()] == rows
    assert not (tmp_path / "found.jsonl.partial").exists()
    wanted, easy = rows
    assert wanted["suffix"] == TRIGGER and wanted["prompt_is_what_was_searched"]
    assert len(wanted["losses"]) == 8 and wanted["loss"] == min(wanted["losses"])
    assert wanted["before"]["rewards"] == [1.0] * 40 and min(wanted["after"]["rewards"]) == -5.0
    assert wanted["after"]["target_log_prob"]["sum"] == pytest.approx(-wanted["loss"], abs=1e-4)
    assert easy["before"]["matched"] == 40
    figures = attack_summary(rows, "reward", -4.0)
    assert figures["before"]["success"]["value"] == 0.0 and figures["after"]["success"]["value"] == 0.5
    assert attack_summary(rows, "reward", -6.0)["after"]["success"]["value"] == 0.0


@pytest.mark.parametrize("excluded", [True, False])
def test_the_judge_sees_the_suffix_only_where_it_is_not_excluded(tmp_path, excluded):
    judge = Judge()
    rows = attacked(tmp_path, judge, rm_exclude_adv_suffix=excluded, gcg_steps=1)
    asked = [GOAL, GOAL + ("" if excluded else rows[0]["suffix"])]
    for request, question in zip(judge.requests, asked):
        prompt = f"<user>{question}<assistant>"
        assert {*request.columns["question"]} == {question} and {*request.prompts} == {prompt}
        assert request.queries[0] == prompt + request.responses[0]


def attack_until_killed(folder, steps):
    advance, count = Search.advance, []

    def until_killed(search, state):
        if len(count) == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        count.append(1)
        advance(search, state)

    Search.advance = until_killed
    attacked(folder)


@pytest.mark.short(1)
@pytest.mark.parametrize("steps_before", [0, 3, 8, 11])
def test_an_attack_that_was_killed_goes_on_to_the_same_findings(tmp_path, steps_before):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    attacked(whole)
    assert warm.call(attack_until_killed, cut, steps_before) == -signal.SIGKILL
    judge = Judge()
    attacked(cut, judge, gcg_batch_size=7)
    assert (cut / "found.jsonl").read_text() == (whole / "found.jsonl").read_text()
    # What was finished is not done again: the replies before the search, and the whole first target.
    assert len(judge.requests) == {0: 4, 3: 3, 8: 2, 11: 1}[steps_before]


@pytest.mark.long
def test_a_search_that_was_not_stored_whole_begins_again_and_ends_the_same(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    attacked(whole)
    assert warm.call(attack_until_killed, cut, 3) == -signal.SIGKILL
    (stored,) = cut.glob("found.jsonl.partial/search.json")
    stored.write_text(stored.read_text()[:20])
    attacked(cut)
    assert (cut / "found.jsonl").read_text() == (whole / "found.jsonl").read_text()


def test_other_settings_do_not_go_on_with_unfinished_work_and_findings_are_not_overwritten(tmp_path, monkeypatch):
    def stop(search, state):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Search, "advance", stop)
        with pytest.raises(KeyboardInterrupt):
            attacked(tmp_path)
    with pytest.raises(UserError, match="unfinished work with another gcg_topk"):
        attacked(tmp_path, gcg_topk=4)
    with pytest.raises(UserError, match="unfinished work with another targets"):
        AttackRun(options_of(tmp_path), planted_policy(), make_tokenizer(), Judge()).work_through(TARGETS[:1])
    attacked(tmp_path)
    with pytest.raises(UserError, match="is there already"):
        attacked(tmp_path)


def test_without_a_judge_the_other_criteria_are_answered(tmp_path):
    run = AttackRun(options_of(tmp_path, reward_pretrain=None), planted_policy(), make_tokenizer(), None)
    rows = run.work_through(TARGETS[:1])
    assert rows[0]["after"]["rewards"] is None
    assert attack_summary(rows, "target", None)["after"]["success"]["value"] == 1.0


def test_findings_lie_beside_what_is_attacked_unless_told_otherwise(tmp_path):
    folder = tmp_path / "kl0.2_s1_harml_actor"
    folder.mkdir()
    beside = options_of(tmp_path, output_path=None, ckpt_path=str(folder))
    assert output_of(beside) == tmp_path / "gcg_eval_kl0.2_s1_harml_actor.jsonl"
    assert str(output_of(options_of(tmp_path, output_path=None, pretrain="owner/name"))) == "gcg_eval_name.jsonl"
    for name, found in ("kl0.2_s1", "kl0.2_s1_harml_actor"), ("other_s1", "other_s1"):
        (folder / "manifest.json").write_text(json.dumps({"run_name": name}))
        assert output_of(beside) == tmp_path / f"gcg_eval_{found}.jsonl", "where figures look for the run"


def test_a_first_suffix_that_does_not_survive_its_own_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Vocabulary, "stable", lambda vocabulary, suffixes: [])
    with pytest.raises(UserError, match="--gcg_optim_str_init 'xxxx' does not come back as the same tokens"):
        attacked(tmp_path, gcg_filter_ids=True)
