"""The pages for people who come from another tool: our commands on them are understood and pass the checks, and what
they say of our names and defaults is so."""

import ast
import inspect
import re

import pytest

import trimtab
from tests.docs.pages import DOCS, blocks, commands
from trimtab.config import aliases
from trimtab.config.jobs import JOBS
from trimtab.config.option import find, options_of
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, refuse_unimplemented, settle

PAGES = ["from_trl", "from_openrlhf", "from_verl", "from_prime_rl"]
FILES = ("math_reward_func.py", "my_score.py", "gsm8k/train.parquet", "gsm8k/test.parquet")
"""What the commands name and the reader has."""


def defaults(page: str) -> str:
    """The table of a page that says what is different by default."""
    return (DOCS / f"{page}.md").read_text().partition("## Different by default")[2]


@pytest.mark.parametrize("page", PAGES)
def test_our_commands_are_understood_and_pass_the_checks(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trimtab.config.resolved_config.find_spec", lambda module: object())  # the extras are installed
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def reward_func(queries, prompts, labels): ...\ncompute_score = reward_func\n")
    found = commands(page)
    assert found and all(words[0] == "trimtab" for words in found)
    for _, verb, *argv in found:
        options, notes = settle(parse(JOBS[verb], argv))
        notes += check(options)
        refuse_unimplemented(options)
        # That ratios are corrected for is said in a line: it is meant.
        assert [note for note in notes if "--mismatch_correction tis;" not in note] == [], verb


def test_the_call_from_python_has_arguments_and_options_that_exist():
    (block,) = blocks("from_trl", "python")
    call = ast.parse(block).body[0].value
    function = getattr(trimtab, call.func.attr)
    known = {*inspect.signature(function).parameters} - {"options"} | options_of(JOBS[call.func.attr]).keys()
    given = {word.arg for word in call.keywords}
    assert given and len(call.args) == 3 and given <= known


@pytest.mark.parametrize("page", PAGES)
def test_options_that_a_page_calls_ours_exist(page):
    text = re.sub(r"^```(?!bash).*?^```", "", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `") and line.count("|") >= 3]
    ours = [cells[2] for cells in rows if not cells[1].strip().endswith(".`")]  # not of the table of dotted names
    named = {name for cell in ours for name in re.findall(r"--([a-z][\w.]+)", cell)}
    assert len(named) > 2
    assert [name for name in named if not any(find(job, name) for job in JOBS.values())] == []


def test_the_two_tables_of_names_are_those_of_the_program():
    page = (DOCS / "from_openrlhf.md").read_text()
    table = page.partition("<!-- begin: dotted -->\n\n")[2].partition("\n<!-- end: dotted -->")[0]
    assert table == aliases.dotted(), "write it anew: dotted() of trimtab/config/aliases.py"


@pytest.mark.parametrize("word", [entry.word for entry in aliases.WORDS if entry.tool == "OpenRLHF"])
def test_dotted_flags_that_mean_something_else_are_not_accepted(word):
    assert all(find(job, word) is None for job in JOBS.values())


def test_a_dotted_flag_is_its_flat_one():
    dotted = "--actor.model_name_or_path a/b --data.prompt_dataset c/d --algo.kl.init_coef 0.5 --ds.lora.rank 8"
    flat = "--pretrain a/b --prompt_data c/d --init_kl_coef 0.5 --lora_rank 8"
    assert parse(JOBS["ppo"], dotted.split()) == parse(JOBS["ppo"], flat.split())
    dotted = "--model.model_name_or_path a/b --data.dataset c/d --model.beta 0.2 --adam.lr 1e-7"
    flat = "--pretrain a/b --dataset c/d --beta 0.2 --learning_rate 1e-7"
    assert parse(JOBS["dpo"], dotted.split()) == parse(JOBS["dpo"], flat.split())


def test_the_pages_tell_our_own_defaults():
    sft, dpo, grpo = (options_of(JOBS[verb]) for verb in ("sft", "dpo", "grpo"))
    rates = [
        f"{options[name].default:g}".replace("e-0", "e-")
        for options, name in ((sft, "learning_rate"), (dpo, "learning_rate"), (grpo, "actor_learning_rate"))
    ]
    assert f"| {', '.join(rates)} |" in defaults("from_trl")
    assert f"| {sft['max_len'].default:,}, {dpo['max_len'].default:,} |" in defaults("from_trl")
    assert f"| epochs of SFT | 3 | {sft['max_epochs'].default} |" in defaults("from_trl")
    assert f"`--train_batch_size` {sft['train_batch_size'].default} in all" in defaults("from_trl")
    lengths = f"{grpo['prompt_max_len'].default:,} and {grpo['generate_max_len'].default:,}"
    assert lengths in defaults("from_verl")
    assert f"| {grpo['rollout_batch_size'].default:,}; {grpo['train_batch_size'].default} answers |" in defaults(
        "from_verl"
    )
    evaluated = f"temperature {grpo['eval_temperature'].default:g}, {grpo['eval_n_samples_per_prompt'].default} answers"
    assert evaluated in defaults("from_verl")
    for page in ("from_trl", "from_verl", "from_prime_rl"):
        assert f"{grpo['init_kl_coef'].default:g}" in defaults(page)
    assert not grpo["bf16"].default and not grpo["gradient_checkpointing"].default and grpo["dual_clip"].default is None
