import sys
import types

import pytest

from trimtab.cli.lora_combiner import main
from trimtab.errors import UserError


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "base" / "model.safetensors").touch()
    return ["--model_path", "./base", "--lora_path", "./adapter", "--output_path", "./merged/"]


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every merge asked for."""
    made = []
    module = types.ModuleType("trimtab.models.save")
    module.merge_adapter = lambda *places, **how: made.append((places, how))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def test_a_merge_gets_its_places_and_says_where_the_model_is(words, calls, capsys):
    assert main([*words, "--is_rm", "--bf16"]) == 0
    assert calls == [(("./base", "./adapter", "./merged/"), {"is_rm": True, "bf16": True})]
    assert capsys.readouterr().out == "model    merged/\n"
    assert main(words) == 0
    assert calls[1][1] == {"is_rm": False, "bf16": False}


def test_a_dry_run_merges_nothing_and_prints_the_config(words, calls, capsys):
    assert main([*words, "--is_rm", "--dry_run"]) == 0
    assert calls == []
    assert "is_rm: true" in capsys.readouterr().out


def test_mistakes_are_one_line_and_exit_code_2(words, calls, monkeypatch, trimtab):
    missing = trimtab("lora-combine", *words[:4]).mistake
    assert missing == "--output_path is missing: give a folder for the merged model" and calls == []

    def fail(*places, **how):
        raise UserError("./adapter was made for another model")

    monkeypatch.setattr(sys.modules["trimtab.models.save"], "merge_adapter", fail)
    assert trimtab("lora-combine", *words).mistake == "./adapter was made for another model"
