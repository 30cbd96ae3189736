"""What the pages say of TRL is what the installed TRL says, and what they say of us is backed by what they name."""

import ast
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
COMPARISON = (PROJECT / "docs" / "comparison.md").read_text()
FROM_TRL = (PROJECT / "docs" / "from_trl.md").read_text()


def source(package: str, path: str = "") -> Path:
    """A file of an installed package, which is not imported: that would take longer than all that is asked here."""
    return Path(importlib.util.find_spec(package).origin).parent / path


def defaults(path: Path) -> dict[str, Any]:
    """The defaults of the configuration class in a file of TRL or transformers, as far as they are plain values."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            said = (
                [k.value for k in node.value.keywords if k.arg == "default"] if isinstance(node.value, ast.Call) else []
            )
            value = said[0] if said else node.value
            found[node.target.id] = value.value if isinstance(value, ast.Constant) else None
    return found


def test_trl_is_of_the_version_that_the_pages_name():
    version = importlib.metadata.version("trl")
    assert f"TRL {version}" in COMPARISON and f"TRL {version}" in FROM_TRL


def test_what_is_said_of_trl_s_defaults_is_in_its_source():
    training = defaults(source("transformers", "training_args.py"))
    assert (training["num_train_epochs"], training["per_device_train_batch_size"]) == (3.0, 8)
    assert training["lr_scheduler_type"] == "linear" and not training["warmup_steps"]
    assert defaults(source("trl", "trainer/base_config.py"))["gradient_checkpointing"] is True
    sft, dpo, grpo = (defaults(source("trl", f"trainer/{name}_config.py")) for name in ("sft", "dpo", "grpo"))
    assert [job["learning_rate"] for job in (sft, dpo, grpo)] == [2e-5, 1e-6, 1e-6]
    assert sft["max_length"] == dpo["max_length"] == 1024 and grpo["max_completion_length"] == 512
    assert grpo["beta"] == 0 and grpo["loss_type"] == "dapo" and grpo["vllm_importance_sampling_correction"] is True
    assert dpo["disable_dropout"] is True and sft.get("disable_dropout") is None
    assert "| learning rate of SFT, DPO, GRPO | 2e-5, 1e-6, 1e-6 |" in FROM_TRL


def test_what_trl_has_and_has_not_is_so():
    stable = {path.name for path in source("trl", "trainer").glob("*_trainer.py")}
    assert {f"{name}_trainer.py" for name in ("sft", "reward", "dpo", "kto", "grpo", "rloo", "distillation")} <= stable
    experimental = {path.name for path in source("trl", "experimental").iterdir()}
    assert {"orpo", "cpo", "gkd", "online_dpo", "async_grpo"} <= experimental
    assert not {"ppo", "prm"} & experimental
    assert defaults(source("trl", "experimental/async_grpo/async_grpo_config.py"))["max_staleness"] == 4
    losses = re.search(
        r"Possible values are: (.*?)\. If", source("trl", "trainer/dpo_config.py").read_text(), re.DOTALL
    )
    assert len(re.findall(r"`'\w+'`", losses.group(1))) == 15 and "TRL's DPO has 15" in COMPARISON


def test_tests_and_pages_that_back_our_claims_exist():
    named = re.findall(r"`(tests/[\w/.]+)`", COMPARISON) + re.findall(r"\]\(([\w./]+\.md)", COMPARISON)
    assert len(named) > 20
    assert [path for path in named if not any((PROJECT / base / path).exists() for base in ("", "docs"))] == []
