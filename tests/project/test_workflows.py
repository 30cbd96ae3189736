"""What runs on a server is what runs here: workflows call targets of the Makefile that exist and are described."""

import re
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: path for path in sorted((PROJECT / ".github" / "workflows").glob("*.yml"))}
TARGETS = set(re.findall(r"^([\w-]+):(?!=)", (PROJECT / "Makefile").read_text(), re.MULTILINE))
GUIDES = (PROJECT / "README.md").read_text() + (PROJECT / "CONTRIBUTING.md").read_text()
ACTIONS = {"actions/checkout", "actions/setup-python", "actions/upload-artifact"}
RUNNER = re.compile(r"(ubuntu-\d\d\.04(-arm)?|macos-\d\d)$")


def read(name: str) -> dict:
    return yaml.load(WORKFLOWS[name].read_text(), yaml.BaseLoader)  # `on` is a word there, not a truth


def jobs(name: str) -> dict:
    return read(name)["jobs"]


def runners(job: dict) -> list[str]:
    if "matrix" not in job["runs-on"]:
        return [job["runs-on"]]
    return job["strategy"]["matrix"]["runner"]


def test_there_is_one_for_each_thing_that_is_promised():
    assert WORKFLOWS.keys() == {"tests", "lint", "wheel", "docs"}
    promised = {"tests": {"make test"}, "lint": {"make lint"}, "wheel": {"make wheel"}, "docs": {"make docs"}}
    for name, commands in promised.items():
        assert commands <= {step.get("run") for job in jobs(name).values() for step in job["steps"]}


def test_tests_run_on_both_kinds_of_linux_and_on_a_mac():
    used = {runner for job in jobs("tests").values() for runner in runners(job)}
    assert any(runner.endswith("04") for runner in used) and any(runner.endswith("-arm") for runner in used)
    assert any(runner.startswith("macos") for runner in used)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_the_keys_that_a_server_reads(name):
    flow = read(name)
    assert flow.keys() <= {"name", "on", "permissions", "concurrency", "env", "jobs"}
    assert flow["name"] == name and {"push", "pull_request"} <= flow["on"].keys()
    assert flow["permissions"] == {"contents": "read"}, "nothing here needs to write"
    for job in flow["jobs"].values():
        assert job.keys() <= {"name", "runs-on", "timeout-minutes", "strategy", "steps"}
        assert all(RUNNER.match(runner) for runner in runners(job)) and int(job["timeout-minutes"]) <= 60
        for step in job["steps"]:
            assert step.keys() <= {"name", "uses", "with", "run"} and ("uses" in step) != ("run" in step)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_few_and_of_a_named_version(name):
    for job in jobs(name).values():
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert used[0].startswith("actions/checkout@")
        assert all(re.fullmatch(r"[\w/-]+@v\d+", action) and action.split("@")[0] in ACTIONS for action in used)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_command_is_a_target_of_the_makefile_that_the_guides_name(name):
    commands = [step["run"] for job in jobs(name).values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        program, target = command.split()
        assert program == "make" and target in TARGETS, f"{name}.yml: {command}"
        assert command in GUIDES, f"{command} is described neither in README.md nor in CONTRIBUTING.md"


def test_what_the_documents_call_tested_leaves_macos_out():
    assert "Linux (what is tested) or macOS" in (PROJECT / "docs" / "install.md").read_text()


def test_every_target_is_declared_as_one():
    declared = re.search(r"^\.PHONY: (.*)$", (PROJECT / "Makefile").read_text(), re.MULTILINE).group(1).split()
    assert {*declared} == TARGETS
