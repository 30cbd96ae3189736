"""Engines are slow to start: one a kind for all tests of a file."""

from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_model
from trimtab.models.policy import Policy
from trimtab.models.weight_export import WeightExport
from trimtab.rollout.trajectory import Trajectory

SIZES = {"hidden_size": 128, "spread": 0.1}  # heads as wide as vLLM's kernels for CPUs want them


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("vllm")


def write_model(folder: Path, **changes) -> Policy:
    model = tiny_model("llama", **SIZES | changes)
    model.save_pretrained(folder)
    return Policy(model)


def engine_of(folder: Path, policy: Policy | None, *, adapters: bool = False, tokenizer=None, **settings):
    from trimtab.rollout.factory import build_vllm_engine

    weights = None if policy is None else WeightExport(policy, bf16=False, adapters=adapters)
    return build_vllm_engine(
        str(folder), tokenizer, weights, **{"eager": True, "max_num_seqs": 16, "longest": 128} | settings
    )


def gap(rollouts: list[Trajectory], policy: Policy, temperature: float = 1.0) -> float:
    """The largest difference between the log-probs of answers and those of the model itself."""
    found = 0.0
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.ids])
        with torch.no_grad():
            logits = policy.model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / temperature
        own = logits.log_softmax(-1).gather(1, torch.tensor(rollout.ids)[:, None])[:, 0]
        found = max(found, (own - torch.from_numpy(rollout.log_probs)).abs().max().item())
    return found


def move(policy: Policy, amount: float = 0.1) -> None:
    """As an optimiser would, by hand."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (amount * parameter.std() + 0.01))


@pytest.fixture
def in_command(monkeypatch, tmp_path):
    """Run a command of the project in this process."""
    from trimtab.cli.main import main

    monkeypatch.chdir(tmp_path)
    return main
