"""Whether fused layers are believed: each is compared alone, with a stand-in for them that errs as told."""

import pytest
import torch

from tests.tiny import tiny_model
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.attention import DecodeMetadata
from trimtab.rollout.builtin.fused_layers import FusedLayers
from trimtab.rollout.builtin.model_runner import ModelRunner, passes_self_check

LAYERS = 12


def erring(errors):
    """The modules' own numbers, off by so much in some layers."""

    def run_layers(self, layers, stream, angles, cache, slot_mapping_T, attend):
        decoding = isinstance(attend.__self__._pass, DecodeMetadata)
        shape = (-1, 1) if decoding else (1, -1)
        x = stream.view(*shape, stream.shape[1])
        embeddings = tuple(part.view(*shape, part.shape[1]) for part in angles)
        generator = torch.Generator().manual_seed(0)
        for index in layers:
            new = self.backbone.layers[index](x, position_embeddings=embeddings, attention_mask=None) - x
            noise = torch.randn(new.shape, generator=generator).to(new.dtype)
            x = x + new + errors.get(index, 0.0) * noise * new.float().square().mean(-1, True).sqrt().to(new.dtype)
        stream.copy_(x.view_as(stream))
        return self.backbone.norm(stream)

    return run_layers


def is_believed(model, run_layers, monkeypatch):
    policy = Policy(model)
    choose_path(policy)
    monkeypatch.setattr(FusedLayers, "run_layers", run_layers)
    with policy.at_work():
        shape, arguments = ModelRunner.measure(policy)
        return passes_self_check(FusedLayers(policy.inner.base_model, arguments), policy, shape, 4)


@pytest.mark.parametrize(
    "dtype, errors, believed",
    [
        (torch.float32, {}, True),
        (torch.float32, {7: 0.003}, False),
        # Over all layers this is more than one is allowed alone.
        (torch.bfloat16, dict.fromkeys(range(LAYERS), 0.015), True),
        (torch.bfloat16, {LAYERS - 1: 0.1}, False),
        (torch.bfloat16, {0: 0.1}, False),
    ],
)
def test_rounding_of_every_layer_is_believed_and_an_error_of_one_is_not(dtype, errors, believed, monkeypatch):
    model = tiny_model("llama", num_hidden_layers=LAYERS, spread=0.1).to(dtype)
    assert is_believed(model, erring(errors), monkeypatch) is believed


def test_layers_that_are_right_alone_and_wrong_together_are_not_believed(monkeypatch):
    right = erring({})

    def run_layers(self, layers, stream, *others):
        return right(self, layers if len(layers) == 1 else layers[:3], stream, *others)

    model = tiny_model("llama", num_hidden_layers=LAYERS, spread=0.1)
    assert is_believed(model, run_layers, monkeypatch) is False


def test_a_model_that_scales_its_embeddings_is_not_believed(monkeypatch):
    assert is_believed(tiny_model("granite", embedding_multiplier=1.1), erring({}), monkeypatch) is False


def test_kernels_are_noted_from_one_layer_of_each_kind():
    backbone = tiny_model("qwen3_moe", num_hidden_layers=5, mlp_only_layers=[2]).base_model
    windows = [{"scaling": 0.5, "sliding_window": window} for window in (None, 8, None, 8, None)]
    fused = FusedLayers(backbone, windows)
    with fused.one_of_each_kind():
        assert list(fused.all) == [0, 1, 2]
    assert list(fused.all) == [0, 1, 2, 3, 4]
