"""Linear layers with adapters: kernels against PEFT's own modules, and which modules are left to themselves."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.rollout.kernel_device import CLOSE, DEVICE, DTYPE
from trimtab.models.fused_layer import lora_linear
from trimtab.rollout.builtin.kernels.int8_linear import added
from trimtab.rollout.builtin.kernels.lora_linear import LoraTiles, lora_applies, lora_gated, lora_product

peft = pytest.importorskip("peft")


class Layers(torch.nn.Module):
    def __init__(self, biased):
        super().__init__()
        for name, outputs in (("q", 128), ("k", 64), ("v", 64), ("up", 128)):
            setattr(self, name, torch.nn.Linear(104, outputs, bias=biased))

    def forward(self, x):
        return torch.cat([self.q(x), self.k(x), self.v(x)], 1), F.silu(self.q(x)) * self.up(x)


def layers_with(targets, biased=False, rank=5, **options):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=rank, lora_alpha=3 * rank, target_modules=targets, **options)
    model = peft.get_peft_model(Layers(biased), config, autocast_adapter_dtype=False).to(DEVICE, DTYPE).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return model.base_model.model


# A third part of the inner dimension has nothing to do with 104 inputs in steps of 64.
@pytest.mark.parametrize("tiles", [None, LoraTiles(16, 64, 64, 3, 4, 3), LoraTiles(32, 32, 32, 2, 4, 2, swapped=True)])
@pytest.mark.parametrize("targets, rank", [(["q", "k", "v", "up"], 5), (["q", "v"], 16), (["k", "up"], 40)])
@pytest.mark.parametrize("biased, rows", [(False, 37), (True, 37), (False, 70)])  # the last makes A x beforehand
def test_products_are_pefts(biased, rows, targets, rank, tiles):
    model = layers_with(targets, biased, rank)
    x = torch.randn(rows, 104, device=DEVICE, dtype=DTYPE)
    q, k, v, up = found = [lora_linear(module) for module in (model.q, model.k, model.v, model.up)]
    assert [layer.rank for layer in found] == [rank if name in targets else 0 for name in ("q", "k", "v", "up")]
    with torch.no_grad():  # PEFT itself rounds four times in half precision, and its sums may cancel
        side_by_side, gated = (y.to(DTYPE) for y in copy.deepcopy(model).float()(x.float()))
        torch.testing.assert_close(added(lora_product(x, [q, k, v], tiles=tiles), DTYPE), side_by_side, **CLOSE)
        alone = lora_product(x, [q], parts=True, tiles=tiles)
        torch.testing.assert_close(added(alone, DTYPE), side_by_side[:, :128], **CLOSE)
        if not biased:
            torch.testing.assert_close(lora_gated(x, q, up, tiles=tiles), gated, **CLOSE)


def test_what_is_switched_off_or_merged_is_the_base_alone():
    model = layers_with(["q"])
    model.q.enable_adapters(False)
    assert lora_linear(model.q).rank == 0 and lora_linear(model.q).weight_OI is model.q.base_layer.weight
    model.q.enable_adapters(True)
    model.q.merge()
    assert lora_linear(model.q).rank == 0
    assert lora_linear(model.k).rank == 0


def test_other_kinds_of_layers_are_left_to_themselves():
    assert lora_linear(layers_with(["q"], use_dora=True).q) is None
    assert lora_linear(torch.nn.Embedding(3, 4)) is None
    replaced = torch.nn.Linear(8, 8)
    replaced.forward = lambda x: x  # as int8 does
    assert lora_linear(replaced) is None
    several = layers_with(["q"]).q
    several.update_layer("second", 4, lora_alpha=4, config=peft.LoraConfig(r=4))
    several.set_adapter(["default", "second"])
    assert lora_linear(several) is None


def test_layers_that_differ_in_rank_or_are_of_odd_width_are_not_joined(monkeypatch):
    monkeypatch.setattr("trimtab.rollout.builtin.kernels.lora_linear.DTYPES", (DTYPE,))
    q, k = lora_linear(layers_with(["q"], rank=4).q), lora_linear(layers_with(["k"], rank=8).k)
    x = torch.zeros(3, 104, device=DEVICE, dtype=DTYPE)
    assert lora_applies(x, [q]) and lora_applies(x, [k]) and not lora_applies(x, [q, k])
    assert not lora_applies(x.double(), [q]) and not lora_applies(x.expand(2000, 3, 104)[:, 0], [q])
