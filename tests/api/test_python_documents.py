"""The Python of README.md and of docs/python.md, run as it stands."""

import re
from pathlib import Path

import pytest

import trimtab
from tests.docs.pages import PROJECT, blocks, commands
from tests.train.job_run import write_rows
from trimtab.cli.main import main
from trimtab.config.jobs import JOBS
from trimtab.config.option import find
from trimtab.config.rl_jobs import GRPOOptions
from trimtab.embedded.sort_task import make_model, make_prompts, make_tokenizer
from trimtab.train.metrics import read_rows


@pytest.fixture
def quickstarted(somewhere):
    """What `trimtab quickstart` leaves, less the learning."""
    make_model().save_pretrained("quickstart/sft")
    make_tokenizer().save_pretrained("quickstart/sft")
    Path("quickstart/task").mkdir()
    write_rows(Path("quickstart/task/prompts.jsonl"), make_prompts(8, 1))


def test_the_example_of_the_readme_runs(quickstarted):
    (code,) = [block for block in blocks("README", "python") if "import trimtab" in block]
    known: dict = {}
    exec(compile(code, "README.md", "exec"), known)
    assert known["run"].finished and known["model"].num_parameters() > 0
    assert len(code.splitlines()) <= 15


def test_the_reward_and_the_command_of_the_readme_run(quickstarted):
    (code,) = [block for block in blocks("README", "python") if "import trimtab" not in block]
    Path("brief.py").write_text(code)
    ((_, *words),) = [words for words in commands("README") if "brief.py:brief" in words]
    assert main(words) == 0
    rewards = [row["reward"] for row in read_rows(Path("quickstart/brief/metrics.jsonl"))]
    assert rewards and all(0 <= reward <= 1.1 for reward in rewards)


def test_the_code_of_the_page_runs(quickstarted):
    known: dict = {}
    for code in blocks("python", "python"):
        exec(compile(code, "python.md", "exec"), known)
    assert len(known["rewards"]) == 2 and len(known["answers"]) == 2 and known["page"].is_file()


def test_the_page_names_every_function_and_only_options_that_there_are():
    page = (PROJECT / "docs" / "python.md").read_text()
    assert all(re.search(rf"`(trimtab\.)?{name}[`(]", page) for name in trimtab._PLACES if name in JOBS)
    code = "".join(blocks("python", "python"))
    of_others = {"key", "step", "max_new_tokens", "best_of_n"}
    used = {*re.findall(r"\b(\w+)=", code), *re.findall(r'"(\w+)":', code)} - of_others - {"input", "label"}
    assert len(used) > 5 and all(find(GRPOOptions, name) for name in used)
