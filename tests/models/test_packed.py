"""A model's own dropout is found and switched off wherever a family keeps it; that of adapters is left alone."""

import copy

import pytest
import torch

from tests.tiny import VOCABULARY, tiny_model
from trimtab.config.training_options import LoraOptions
from trimtab.models.lora import add_adapters
from trimtab.models.packed import dropout_off, has_dropout, switch_off_dropout

DROPOUTS = {
    "llama": {"attention_dropout": 0.3},
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "gpt_neox": {"attention_dropout": 0.3, "hidden_dropout": 0.3},
    "opt": {"dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.3},
    "bloom": {"attention_dropout": 0.3, "hidden_dropout": 0.3},
    "mixtral": {"router_jitter_noise": 0.1},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.1},  # its routers draw experts, too
}


def differs(model):
    """Whether two passes in training mode differ."""
    ids, found = torch.arange(3, VOCABULARY)[None], []
    for seed in range(4):
        torch.manual_seed(seed)
        found.append(model.train()(input_ids=ids, use_cache=False).logits)
    return any(not torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("family", DROPOUTS)
def test_without_its_dropout_a_model_in_training_repeats_itself(family):
    model = tiny_model(family, attn_implementation="eager", **DROPOUTS[family])
    assert differs(model) and has_dropout(model)
    before = model.config.to_dict()
    assert switch_off_dropout(model)
    assert not differs(model) and not has_dropout(model)
    assert model.config.to_dict() == before, "the saved model must say what it was trained with"


def test_dropout_is_off_for_a_while():
    model = tiny_model("phimoe", attn_implementation="eager", **DROPOUTS["phimoe"]).train()
    with dropout_off(model):
        assert not differs(model)
    assert differs(model) and all(module.training for module in model.modules())
    assert copy.deepcopy(model).eval().train().training


def test_a_model_without_dropout_is_left_as_it_is():
    assert not has_dropout(tiny_model("llama")) and not switch_off_dropout(tiny_model("gpt2"))


def test_the_dropout_of_adapters_stays():
    model = tiny_model("llama", attention_dropout=0.3)
    switch_off_dropout(model)
    adapted = add_adapters(model, LoraOptions(lora_rank=4, lora_dropout=0.2))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    assert differs(adapted)
