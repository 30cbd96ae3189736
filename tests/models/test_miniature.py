"""Of a model whose weights nobody holds: the path is found with little memory, and is the one the whole model takes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tests.tiny import FAMILIES, tiny_model
from trimtab.models import selfcheck
from trimtab.models.policy import Policy
from trimtab.models.reward import RewardModel
from trimtab.models.selfcheck import choose_path

WIDER = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}


@pytest.fixture
def built(monkeypatch):
    """What was built to find a path."""
    models, plain = [], selfcheck._small_model

    def build(kind, config):
        models.append(plain(kind, config))
        return models[-1]

    monkeypatch.setattr(selfcheck, "_small_model", build)
    return models


def check(root, kind=Policy, **allowed):
    cpu = {"dtype": torch.float32, "device": torch.device("cpu")}
    return selfcheck.choose_path_without_weights(kind(root), **{"packed_allowed": True, **cpu, **allowed})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_the_path_that_it_takes_whole(family, built):
    wider = WIDER | ({"word_embed_proj_dim": 96} if family == "opt" else {})
    model = tiny_model(family, num_hidden_layers=3, **wider)
    verdict, whole = check(model), choose_path(Policy(model))
    assert (verdict.path, verdict.reason) == (whole.path, whole.reason.replace("in 3 layers", "in 2 layers"))
    assert [small.config.hidden_size for small in built] == [32]


@pytest.mark.parametrize(("kind", "root"), [(LlamaForCausalLM, Policy), (LlamaForSequenceClassification, RewardModel)])
def test_a_very_wide_model_is_checked_with_little_memory(kind, root, built):
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = kind(LlamaConfig(**sizes, **heads, pad_token_id=128004, num_labels=1))
    module = root(model)
    assert check(model, root).path == "packed"
    assert module.config.hidden_size == 8192 and module.config.num_hidden_layers == 80
    assert sum(parameter.numel() for small in built for parameter in small.parameters()) < 2e7
    assert built[0].config.head_dim == 128


def test_an_attention_that_was_asked_for_is_checked_on_a_narrow_model_too(built):
    assert check(tiny_model("llama", **WIDER), packed_allowed=False).path == "padded"
    assert [small.config.hidden_size for small in built] == [32]


@pytest.mark.parametrize("change", [{"num_attention_heads": 3}, {"num_experts_per_tok": 99}, {"hidden_act": "none"}])
def test_where_a_narrow_model_does_not_work_a_wide_one_decides(change, built, monkeypatch):
    plain = selfcheck.narrow

    def broken(config):
        small = plain(config)
        for name, value in change.items():
            setattr(small, name, value)
        return small

    monkeypatch.setattr(selfcheck, "narrow", broken)
    assert check(tiny_model("mixtral", **WIDER)).path == "packed"
    assert built[-1].config.hidden_size == 96
