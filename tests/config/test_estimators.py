"""The table of estimators: docs/rl.md agrees with it, and what the page adds to it works under its own name."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.config.jobs import JOBS
from trimtab.config.objective_options import ESTIMATORS
from trimtab.config.rl_jobs import RLOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rl.md").read_text()


def test_the_page_has_the_table():
    table = PAGE.split("| `--advantage_estimator` |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    verbs = [job for job in JOBS.values() if issubclass(job, RLOptions) and job.verb not in ("rl", "tail")]
    for row, estimator in zip(rows, ESTIMATORS.values(), strict=True):
        name, called, presets, shaped, then = row
        assert (name, called) == (f"`{estimator.name}`", estimator.called)
        assert re.findall(r"\w+", presets) == [job.verb for job in verbs if job.advantage_estimator == estimator.name]
        assert (shaped != "R") == estimator.grouped
        assert ("gamma" in then) == estimator.discounted
        assert ("critic" in then) == estimator.critic
        assert ("whitened" in then) == estimator.whitened


def test_a_variant_is_one_of_an_estimator_that_a_verb_is_named_after():
    own = {job.advantage_estimator for job in JOBS.values() if issubclass(job, RLOptions)}
    assert {estimator.variant_of for estimator in ESTIMATORS.values()} - {None} <= own


@pytest.fixture
def changed(tmp_path):
    """A copy of the package with what the page adds to it."""
    shutil.copytree(ROOT / "trimtab", tmp_path / "trimtab")
    changes = re.findall(r"^```diff\n--- (\S+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(changes) == 2
    for name, lines in changes:
        kinds = [(line[0], line[1:]) for line in lines.splitlines(keepends=True)]
        before, after = ("".join(text for kind, text in kinds if kind != other) for other in "+-")
        source = (tmp_path / name).read_text()
        assert source.count(before) == 1, f"{name} has other lines than docs/rl.md says"
        (tmp_path / name).write_text(source.replace(before, after))
    return tmp_path


RUN = """
import json
from pathlib import Path
from tests.report.pages import write_rl_run
from tests.train.rl.test_experience import make
from trimtab.config.resolved_config import check
from trimtab.config.parser import help_text
from trimtab.config.jobs import GRPOOptions
from trimtab.errors import UserError
from trimtab.report.run_data import read_run
from trimtab.report.summary import job_name
from trimtab.train.rl.token_advantages import compute_advantages

def refusal(**options):
    try:
        check(GRPOOptions(pretrain="m/m", prompt_data="d/d", reward_pretrain="r/r", **chosen, **options))
    except UserError as error:
        return str(error)

chosen = {"advantage_estimator": "group_best"}
experience = make(n=3)
experience.old_N = experience.sampled_N
compute_advantages(experience, GRPOOptions(**chosen, n_samples_per_prompt=3), kl_coefficient=0.0)
found = {
    "rewards": experience.rewards_S.tolist(),
    "advantages": [experience.advantages_N[experience.owners_N == i].tolist() for i in range(len(experience))],
    "name": job_name(read_run(write_rl_run(Path("run"), "grpo", **chosen))),
    "help": help_text(GRPOOptions, everything=True),
    "refusals": [refusal(), refusal(n_samples_per_prompt=1), refusal(placeholder_token="+", step_reward="steps")],
}
print(json.dumps(found))
"""


@pytest.mark.long
def test_what_the_page_adds_is_an_estimator_like_the_others(changed):
    # There `trimtab` is the copy, and `tests` are ours.
    known = os.environ | {"PYTHONPATH": f"{changed}{os.pathsep}{ROOT}"}
    told = subprocess.run([sys.executable, "-c", RUN], cwd=changed, env=known, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    rewards, advantages = found["rewards"], found["advantages"]
    assert len(rewards) == 9
    for i, reward in enumerate(rewards):
        best = max(rewards[i // 3 * 3 : i // 3 * 3 + 3])
        assert advantages[i] == pytest.approx([reward - best] * len(advantages[i]), abs=1e-6)
    assert found["name"] == "Reinforcement learning (GRPO against the best)" and found["name"] in PAGE
    assert "group_best (GRPO against the best)" in " ".join(found["help"].split())
    meant, alone, steps = found["refusals"]
    assert meant is None
    assert alone.startswith("--advantage_estimator group_best compares the answers to one prompt")
    assert steps == "--step_reward steps: --advantage_estimator group_best judges whole answers; use min or last"
