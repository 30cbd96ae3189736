"""What a model card says of a run, and what it keeps to itself."""

import json

import pytest

from tests.report.pages import write_run
from trimtab.data.hub import base_card
from trimtab.report.model_card import write_model_card

PRIVATE = ("/secret", "secret/", "home", "internal", "8000")


def card_of(folder, base=None) -> str:
    write_model_card(folder, base or {})
    return (folder / "README.md").read_text()


@pytest.mark.parametrize(
    "name, value, shown",
    [
        ("pretrain", "/home/me/secret/base", "base"),
        ("pretrain", "some/model", "some/model"),
        ("prompt_data", "/home/me/secret/x.jsonl,/home/me/secret/y.jsonl", "x.jsonl,y.jsonl"),
        ("prompt_data", "json@/home/secret/rows,org/data", "json@rows,org/data"),
        ("prompt_data", "secret/x.jsonl,secret/y", "x.jsonl,y"),
        ("teacher_model", "~/secret/teacher", "teacher"),
        ("teacher_model", "../secret/teacher", "teacher"),
        ("ref_pretrain", "home/secret/reference", "reference"),
        ("reward_func", "/home/secret/rewards.py:score", "rewards.py:score"),
        ("judge", "http://internal:8000/v1,https://internal/secret", "(an address),(an address)"),
        ("remote_rm_url", "http://internal:8000/get_reward", "(an address)"),
        ("judge", "10.0.0.5:6379,internal.example:80/v1", "(an address),(an address)"),
        ("reward_verifier", "gsm8k:1,format:0.2", "gsm8k:1,format:0.2"),
    ],
)
def test_paths_are_last_names_and_addresses_are_not_shown(name, value, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret" / "y").mkdir(parents=True)
    folder = write_run(tmp_path / "run", "dpo" if name == "ref_pretrain" else "grpo", **{name: value})
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"reward": f"1 x the code of {value}"}))
    card = card_of(folder)
    assert f"{name}: {shown}" in card and not [word for word in PRIVATE if word in card], card
    facts = card.split("## Training")[1].split("## Figures")[0]
    assert shown.split(",")[0] in facts


def test_a_base_model_that_is_gone_is_not_named():
    assert base_card("/home/secret/base") == {}
