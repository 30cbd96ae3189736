"""The recipes of several commands run in their tiny mode: bash puts the commands together, this process runs them."""

import importlib
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.cli.sft_job import write_rows
from tests.examples.test_examples import EXAMPLES, folder, run  # noqa: F401 (a fixture)
from trimtab.config import jobs
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, refuse_unimplemented, settle

CHAINS = {  # recipe: the commands of its tiny mode
    "conditional_sft": ["train_rm", "batch_inference", "train_sft", "batch_inference"],
    "rejection_sampling": ["train_rm"] + 2 * ["batch_inference", "batch_inference", "train_sft"],
    "iterative_dpo": ["train_rm"] + 3 * ["batch_inference", "batch_inference", "train_dpo"],
}

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the recipes are bash scripts")


def commands(name: str, **settings: str) -> list[tuple[str, list[str]]]:
    """The modules and options that the recipe would run one after the other."""
    done = run(name, LAUNCH=r"printf %s\0", **settings)
    assert done.returncode == 0, done.stderr.decode()
    found: list[tuple[str, list[str]]] = []
    for word in done.stdout.decode().split("\0")[:-1]:
        if word.startswith("trimtab.cli."):
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return found


def options_of(module: str, words: list[str]):
    verb = module.rpartition(".")[2].removeprefix("train_").replace("batch_inference", "generate")
    return settle(parse(jobs.JOBS[verb], words))[0]


@pytest.mark.short(1)
@pytest.mark.parametrize("name", CHAINS)
def test_a_recipe_runs_from_end_to_end_in_its_tiny_mode(name, folder, capsys):  # noqa: F811
    assert os.access(EXAMPLES / f"{name}.sh", os.X_OK)
    tiny = {"TINY": "1", "TINY_FOLDER": str(folder)}
    chain = commands(name, **tiny)
    assert [module.removeprefix("trimtab.cli.") for module, _ in chain] == CHAINS[name]
    for module, words in chain:
        assert importlib.import_module(module).main(words) == 0, capsys.readouterr().err
    used = [options_of(*command) for command in chain]
    for before, after in itertools.pairwise(used[1:]):  # each reads what the one before it wrote
        wrote = getattr(before, "output_path", None) or before.save_path
        assert wrote in (after.dataset, after.pretrain)
    last = Path(used[-1].output_path if name == "conditional_sft" else used[-1].dataset)
    assert all(json.loads(line) for line in last.read_text().splitlines()) and last.stat().st_size
    assert commands(name, **tiny) == []  # run again, it finds everything done


@pytest.mark.parametrize("name", CHAINS)
def test_a_whole_recipe_passes_the_checks(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module, words in commands(name):
        options = options_of(module, words)
        # What an earlier command writes is not there yet.
        if options.pretrain.startswith("./"):
            os.makedirs(options.pretrain, exist_ok=True)
        if options.dataset.startswith("./"):
            write_rows(Path(options.dataset), [{}])
        assert check(options) == []
        refuse_unimplemented(options)
        assert options.bf16 and options.max_len >= 2048
