"""Which layers get adapters, and fused layers with adapters against PEFT."""

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.samples import batch_of
from tests.tiny import COMMON, LATENT, ROUTED, tiny_model
from trimtab.config.training_options import LoraOptions
from trimtab.errors import UserError
from trimtab.models.fused_layer import apply_linear, apply_linears
from trimtab.models.lora import adapters_off, add_adapters
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path

HEADS = {"num_key_value_heads": 1, "head_dim": 16, "o_lora_rank": 8, "o_groups": 2, "num_hash_layers": 0}
INDEX = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "layer_types": ["sliding_attention"] * 2}
OWN = {
    "llama4_text": {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4, "moe_layers": [1]},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v4": LATENT | ROUTED | HEADS | INDEX,
    "mamba": {"state_size": 4, "time_step_rank": 4},
}
UNLIKE = {"llama4_text": "router", "phimoe": "router", "deepseek_v4": "o_a_proj"}


def model_of(family):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**COMMON, **OWN[family]}))


def adapted(model, *targets):
    return add_adapters(model, LoraOptions(lora_rank=4, target_modules=targets or ("all-linear",)))


def names(model):
    return [name.removeprefix("base_model.model.") for name, m in model.named_modules() if isinstance(m, LoraLayer)]


@pytest.mark.parametrize("family", UNLIKE)
def test_subclasses_of_linear_layers_that_compute_something_else_get_none(family):
    model = model_of(family)
    plain = [name for name, m in model.named_modules() if type(m) is nn.Linear and name != "lm_head"]
    unlike = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and type(m) is not nn.Linear]
    assert unlike and all(name.endswith(UNLIKE[family]) for name in unlike)
    policy = Policy(adapted(model))
    assert names(policy.model) == plain
    choose_path(policy)
    policy(batch_of([7, 5])).log_probs_N.sum().backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if "lora_B" in name}
    assert len(gradients) == len(plain) and all(gradient is not None for gradient in gradients.values())


def test_a_subclass_that_is_linear_and_quantised_layers_get_theirs():
    assert len(names(adapted(tiny_model("falcon")))) == 8  # FalconLinear

    class Quantised(nn.Linear):
        def forward(self, x):
            return (super().forward(x),)  # never asked: its library and PEFT know what it does

    model = tiny_model("llama")
    model.model.layers[0].self_attn.q_proj = Quantised(32, 32)
    assert "model.layers.0.self_attn.q_proj" in names(adapted(model))


def test_naming_one_that_takes_none_is_one_line():
    with pytest.raises(
        UserError, match=r"^--target_modules router: model.layers.0.\w+.router is a PhimoeTopKRouter"
    ) as told:
        adapted(model_of("phimoe"), "router")
    assert str(told.value).endswith("k_proj, o_proj, q_proj, v_proj")


def test_what_peft_refuses_is_told_with_a_list_that_works():
    with pytest.raises(UserError, match="'out_proj' is incompatible with Mamba-based models") as told:
        adapted(model_of("mamba"))
    said, working = str(told.value).split("; give --target_modules ")
    assert said.startswith("--target_modules all-linear: PEFT refuses it: ") and working == "dt_proj in_proj x_proj"
    assert len(names(adapted(model_of("mamba"), *working.split()))) == 6


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")])
def test_fused_layers_with_adapters_have_pefts_results_and_gradients(targets, frozen):
    attention = adapted(tiny_model("qwen2"), *targets).double().base_model.model.model.layers[0].self_attn
    for weight in attention.parameters():
        weight.requires_grad_(weight.requires_grad or not frozen)
        nn.init.normal_(weight)
    x = torch.randn(5, attention.q_proj.in_features, dtype=torch.float64, requires_grad=True)
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    learned = [x, *(weight for weight in attention.parameters() if weight.requires_grad)]
    found, made = [], []
    for project in (lambda: (*apply_linears(modules, x), apply_linear(attention.o_proj, x)),
                    lambda: (*(module(x) for module in modules), attention.o_proj(x))):  # fmt: skip
        made.append(torch.cat(project(), 1))
        weights = torch.arange(made[-1].numel(), dtype=torch.float64).view_as(made[-1]).sin()
        found.append(torch.autograd.grad((made[-1] * weights).sum(), learned))
    torch.testing.assert_close(*made)
    torch.testing.assert_close(*found)
    with adapters_off(attention), torch.no_grad():
        expected = attention.q_proj.base_layer(x)
        assert not torch.equal(expected, made[0][:, : expected.shape[1]])
        torch.testing.assert_close(apply_linear(attention.q_proj, x), expected)
