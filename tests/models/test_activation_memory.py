"""What layers keep changes memory, and no gradient by a bit."""

import pytest
import torch

from tests.samples import batch_of
from tests.tiny import FAMILIES, tiny_model
from trimtab.config.jobs import SFTOptions
from trimtab.config.resolved_config import settled_and_checked
from trimtab.errors import UserError
from trimtab.models.activation_memory import ActivationOffload, OffloadedTensor, enable_gradient_checkpointing
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.plan.fake_model import LiveBytes

WAYS = {
    "everything": {"gradient_checkpointing": False},
    "half": {"gradient_checkpointing_layers": 1},
    "products": {"gradient_checkpointing_keep": "products"},
    "attention": {"gradient_checkpointing_keep": "attention"},
    "nothing": {},
}


def options_of(way):
    return SFTOptions(**{"gradient_checkpointing": True, **WAYS[way]})


def gradients(family, way, *, away=False):
    policy = Policy(tiny_model(family))
    choose_path(policy)
    enable_gradient_checkpointing(policy, options_of(way))
    if away:
        policy.activations = ActivationOffload(policy, small=64)
    policy.train()
    batch = batch_of([5, 9, 4], seed=3)
    policy(batch).log_probs_N.sum().backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


@pytest.mark.short(8)
@pytest.mark.parametrize(
    "family", [*dict.fromkeys(("llama", "gpt2", "gemma2", "mixtral", "qwen3", "opt", *sorted(FAMILIES)))]
)
def test_gradients_are_the_same_whatever_is_kept(family):
    expected = gradients(family, "everything")
    for way in list(WAYS)[1:]:
        found = gradients(family, way)
        assert all(torch.equal(found[name], expected[name]) for name in expected), way


@pytest.mark.parametrize("family", ["llama_tied", "mixtral", "gpt2"])
def test_activations_come_back_from_main_memory_as_they_went(family, monkeypatch):
    sizes = []
    keep = OffloadedTensor.__init__
    monkeypatch.setattr(
        OffloadedTensor,
        "__init__",
        lambda self, tensor, *more: (sizes.append(tensor.numel()), keep(self, tensor, *more))[1],
    )
    expected = gradients(family, "everything")
    found = gradients(family, "nothing", away=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    layers, tokens, width = 2, 18, 32
    assert sizes.count(tokens * width) >= layers  # their inputs
    assert max(sizes) <= tokens * width, "no weights, and nothing that layers compute inside"


def test_what_is_kept_grows_with_what_is_asked_for():
    kept = {}
    for way in WAYS:
        policy = Policy(tiny_model("llama"))
        choose_path(policy)
        enable_gradient_checkpointing(policy, options_of(way))
        policy.train()
        with LiveBytes([*policy.parameters(), *policy.buffers()]) as live:
            loss = policy(batch_of([40, 60], seed=3)).log_probs_N.sum()
            kept[way] = live.now
        loss.backward()
    assert kept["nothing"] < 0.25 * kept["everything"]
    assert kept["nothing"] < kept["attention"] < kept["products"] < kept["everything"]
    assert kept["half"] == pytest.approx((kept["nothing"] + kept["everything"]) / 2, rel=0.15)


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"offload_activations": True}, "--offload_activations needs --gradient_checkpointing: add it"),
        ({"gradient_checkpointing_layers": 0}, "--gradient_checkpointing_layers is 0: it must be at least 1"),
        ({"gradient_checkpointing_keep": "most"}, "--gradient_checkpointing_keep is most: it must be nothing, "),
        (
            {"gradient_checkpointing": True, "offload_activations": True, "gradient_checkpointing_keep": "products"},
            "--offload_activations takes what layers keep that all recompute: leave --gradient_checkpointing_keep out",
        ),
        (
            {
                **{"gradient_checkpointing": True, "gradient_checkpointing_use_reentrant": True},
                "gradient_checkpointing_layers": 1,
            },
            "--gradient_checkpointing_layers does not work with --gradient_checkpointing_use_reentrant: leave that out",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes, line):
    with pytest.raises(UserError) as refusal:
        settled_and_checked(SFTOptions(pretrain="a/b", dataset="a/b", **changes))
    assert str(refusal.value).startswith(line)


def test_more_layers_than_there_are_are_refused():
    options = SFTOptions(gradient_checkpointing=True, gradient_checkpointing_layers=3)
    with pytest.raises(UserError, match=r"^--gradient_checkpointing_layers 3: LlamaForCausalLM has 2 layers"):
        enable_gradient_checkpointing(Policy(tiny_model("llama")), options)
