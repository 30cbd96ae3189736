"""Citation, templates and hooks: what other people's programs read of the repository."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import trimtab

PROJECT = Path(__file__).parents[2]
GITHUB = PROJECT / ".github"


def test_the_citation_is_of_this_version_and_licence():
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text())
    metadata = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}  # what its schema cannot do without
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["version"] == trimtab.__version__ and citation["license"] == metadata["license"]
    assert all("name" in author or "family-names" in author for author in citation["authors"])
    assert citation["keywords"] == metadata["keywords"]


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_a_form_for_issues_has_what_github_asks_of_one(name):
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form["name"] and form["description"] and form["body"]
    ids = [field["id"] for field in form["body"]]
    assert len({*ids}) == len(ids)
    for field in form["body"]:
        assert field["type"] in {"textarea", "input", "dropdown", "checkboxes"} and field["attributes"]["label"]
        assert field.get("validations", {}).keys() <= {"required"}
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_hooks_use_the_tools_of_the_environment_and_download_nothing():
    config = yaml.safe_load((PROJECT / ".pre-commit-config.yaml").read_text())
    (repository,) = config["repos"]
    assert repository["repo"] == "local"
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert hooks.keys() >= {"ruff-check", "ruff-format", "mypy"}
    assert all(hook["language"] == "system" and hook["entry"].startswith(".venv/bin/") for hook in hooks.values())
    for path in re.findall(r"(?<= )tests/\S+", " ".join(hook["entry"] for hook in hooks.values())):
        assert (PROJECT / path).exists()


def test_the_checks_of_a_pull_request_are_targets_that_exist():
    text = (GITHUB / "pull_request_template.md").read_text()
    targets = re.findall(r"`make ([\w-]+)`", text)
    assert targets and all(f"\n{target}:" in (PROJECT / "Makefile").read_text() for target in targets)


@pytest.mark.parametrize("name", ["CODE_OF_CONDUCT.md", "SECURITY.md", "CONTRIBUTING.md"])
def test_links_of_the_project_s_pages_lead_somewhere(name):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (PROJECT / name).read_text())
    assert links and [link for link in links if not (PROJECT / link).exists()] == []
