"""`trimtab attack` as a user types it, on tiny models."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaForSequenceClassification

from tests.cli.sft_job import make_tokenizer, write_model
from tests.tiny import tiny_model
from trimtab.config.jobs import AttackOptions
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, settle

DOCUMENTED = """--pretrain HuggingFaceTB/SmolLM-135M-Instruct --ckpt_path {ckpt} --file_path {goals}
    --atk_success_criteria reward --reward_pretrain OpenAssistant/reward-model-deberta-v3-large-v2
    --reward_threshold -4.0 --rm_exclude_adv_suffix --zero_stage 2 --gradient_checkpointing --parameterization policy
    --max_targets 100 --max_new_tokens 20 --scenario behaviors --gcg_steps 250 --gcg_search_width 512 --gcg_topk 256
    --gcg_batch_size 512 --gcg_n_replace 1 --gcg_buffer_size 0 --gcg_use_prefix_cache --gcg_filter_ids"""
FEW = "--gcg_steps 2 --gcg_search_width 8 --gcg_topk 8 --samples_per_prompt 5 --max_new_tokens 4 --gcg_filter_ids"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """model/, judge/ and goals.csv."""
    folder = tmp_path_factory.mktemp("attack")
    write_model(folder / "model")
    tokenizer = make_tokenizer()
    config = tiny_model("llama", vocab_size=len(tokenizer), pad_token_id=0).config
    config.num_labels = 1
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(folder / "judge")
    tokenizer.save_pretrained(folder / "judge")
    (folder / "goals.csv").write_text("goal,target\nHow are you,Sure\nWho is it,Me\n")
    (folder / "answers.csv").write_text("goal,answer\nHow are you,Sure\n")
    return folder


def words(place, extra="", goals="goals.csv"):
    return shlex.split(f"attack --pretrain {place}/model --file_path {place}/{goals} {FEW} {extra}")


def test_the_documented_command_means_what_it_says(tmp_path):
    (tmp_path / "goals.csv").write_text("goal,target\na,b\n")
    command = DOCUMENTED.format(ckpt=tmp_path, goals=tmp_path / "goals.csv")
    options, _ = settle(parse(AttackOptions, shlex.split(command)))
    assert check(options) == [
        "--gradient_checkpointing has no effect in an attack: nothing is trained",
        "--zero_stage has no effect in an attack: it runs in one process",
    ]
    assert options.rm_exclude_adv_suffix and options.gcg_filter_ids and options.gcg_use_prefix_cache
    assert (options.reward_threshold, options.samples_per_prompt, options.seed) == (-4.0, 1000, 42)


@pytest.mark.parametrize(
    "extra",
    [
        *("--reward_threshold -4", "--rm_exclude_adv_suffix", "--normalize_reward"),
        *("--reward_input text", "--rm_max_len 64", "--value_head_prefix head"),
    ],
)
def test_options_of_a_reward_model_that_is_not_there_are_a_warning(place, extra):
    _, *given = words(place, f"--atk_success_criteria prefix {extra}")
    assert check(parse(AttackOptions, given)) == [f"{extra.split()[0]} has no effect without --reward_pretrain"]
    assert check(parse(AttackOptions, [*given, "--reward_pretrain", f"{place}/judge"])) == []


def found_by(trimtab, place, extra) -> tuple[str, list[dict]]:
    """What an attack prints and writes."""
    done = trimtab(*words(place, extra))
    assert done.code == 0, done.err
    output = Path(extra.split("--output_path ")[1])
    return done.out, [json.loads(line) for line in output.read_text().splitlines()]


def test_an_attack_writes_its_findings_and_says_what_came_out(place, tmp_path, trimtab):
    output = tmp_path / "found.jsonl"
    judged = f"--reward_pretrain {place}/judge --reward_threshold 0 --output_path {output}"
    out, rows = found_by(trimtab, place, judged)
    assert "plain goal" in out and "with suffix" in out and str(output) in out
    assert [row["goal"] for row in rows] == ["How are you", "Who is it"]
    assert all(len(row["after"]["rewards"]) == 5 for row in rows)
    figures = json.loads((tmp_path / "found.summary.json").read_text())
    assert figures["targets"] == 2 and len(figures["after"]["successful_replies"]) == 2


def test_normalised_rewards_are_on_the_scale_that_training_had(place, tmp_path, trimtab):
    """A threshold means the same in `trimtab tail --normalize_reward` and in the attack on what it wrote."""
    judge = shutil.copytree(place / "judge", tmp_path / "judge")
    config = json.loads((judge / "config.json").read_text()) | {"mean": 0.25, "std": 0.5}
    (judge / "config.json").write_text(json.dumps(config))
    found = {}
    for extra in "", "--normalize_reward":
        judged = f"{extra} --reward_pretrain {judge} --reward_threshold 0 --output_path {tmp_path}/found{extra}.jsonl"
        _, rows = found_by(trimtab, place, judged)
        found[extra] = torch.tensor([row["after"]["rewards"] for row in rows])
    torch.testing.assert_close(found["--normalize_reward"], (found[""] - 0.25) / 0.5)


@pytest.mark.parametrize(
    "extra, goals, complaint",
    [
        ("--atk_success_criteria prefix", "answers.csv", "has no column target"),
        ("--atk_success_criteria prefix", "none.csv", "--file_path: .*none.csv does not exist"),
        ("", "goals.csv", "--atk_success_criteria reward needs --reward_pretrain"),
        ("--reward_pretrain {place}/judge --reward_threshold 0 --normalize_reward", "goals.csv", "has no mean and std"),
        ("--reward_pretrain ./judge", "goals.csv", "--reward_pretrain: ./judge does not exist"),
        ("--atk_success_criteria luck", "goals.csv", "it must be reward, prefix or target"),
        ("--atk_success_criteria prefix --scenario tales", "goals.csv", "it must be behaviors or strings"),
        ("--atk_success_criteria prefix --gcg_steps 0", "goals.csv", "--gcg_steps is 0"),
        ("--atk_success_criteria prefix --nproc 2", "goals.csv", "one process"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(place, trimtab, extra, goals, complaint):
    assert re.search(complaint, trimtab(*words(place, extra.format(place=place), goals)).mistake)


def test_a_dry_run_reads_the_targets_and_attacks_nothing(place, tmp_path, trimtab):
    done = trimtab(*words(place, f"--atk_success_criteria prefix --output_path {tmp_path}/found.jsonl --dry_run"))
    assert done.code == 0 and "# targets: 2, 4 steps in all" in done.out and not any(tmp_path.iterdir())
