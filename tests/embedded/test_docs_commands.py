"""Every command of docs/sft.md runs, on few rows."""

import re
import shlex
from pathlib import Path

from trimtab.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "sft.md"
FEW = ["--max_samples", "72"]  # two steps at the page's batch size, the second a small one


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip() and not line.startswith("#")]


def test_every_command_of_the_sft_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    words = commands()
    assert len(words) >= 8 and {word[0] for word in words} == {"trimtab"}
    for _, verb, *rest in words:
        extra = {"quickstart": ["--steps", "2"], "sft": FEW}.get(verb, [])
        assert main([verb, *rest, *extra]) == 0, (verb, rest, capsys.readouterr().err)
    assert (tmp_path / "my-adapter" / "adapter_config.json").is_file()
    assert (tmp_path / "my-model" / "report.html").is_file()


def test_the_pages_promise_of_what_a_run_leaves_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    assert main(["quickstart", "--steps", "1"]) == 0
    promised = re.findall(r"`([\w.]+\.\w+)`", PAGE.read_text().split("## What a run leaves")[1].split("## Data")[0])
    assert len(promised) >= 5
    for name in promised:
        assert (tmp_path / "quickstart" / "sft" / name).is_file(), name
