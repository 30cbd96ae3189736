"""Products for few rows and what happens in their registers, against plain torch."""

import pytest
import torch
import torch.nn.functional as F

from tests.rollout.kernel_device import CLOSE, DEVICE, DTYPE
from tests.rollout.test_kernels import noise
from trimtab.models.layer_kernels import rope_and_cache
from trimtab.rollout.builtin.kernels.fused_linear import (
    LinearTiles,
    few_rows_apply,
    small_batch_gate_up,
    small_batch_linears,
    small_batch_qkv_rope,
    small_batch_split_k,
)


def linear(inner, outputs, bias=False):
    torch.manual_seed(outputs)
    return torch.nn.Linear(inner, outputs, bias=bias).to(DEVICE, DTYPE).requires_grad_(False)


# 80 numbers leave a step half empty.
@pytest.mark.parametrize("tiles", [None, LinearTiles(16, 64, 32, 1, 3, False), LinearTiles(32, 128, 64, 1, 3, True)])
@pytest.mark.parametrize("rows", [1, 40])
def test_gated_products_equal_silu_times_up(rows, tiles):
    x, gate, up = noise(rows, 80, dtype=DTYPE), linear(80, 192), linear(80, 192)
    up.weight.data = up.weight + 0.1
    expected = F.silu(gate(x)) * up(x)
    torch.testing.assert_close(small_batch_gate_up(x, gate, up, tiles), expected, **CLOSE)


@pytest.mark.parametrize("tiles", [None, LinearTiles(16, 32, 32, 1, 3, False), LinearTiles(32, 128, 16, 1, 3, True)])
@pytest.mark.parametrize("widths, biased", [((192, 64, 16, 16), True), ((48, 16), False), ((80, 80, 80), True)])
@pytest.mark.parametrize("rows, inner", [(1, 80), (33, 96), (70, 80)])
def test_products_of_one_input_are_made_together(rows, inner, widths, biased, tiles):
    """Tiles that several modules share, and last ones that are not full."""
    x, modules = noise(rows, inner, dtype=DTYPE), [linear(inner, width, biased) for width in widths]
    found = small_batch_linears(x, modules, tiles)
    for module, own in zip(modules, found, strict=True):
        torch.testing.assert_close(own, module(x), **CLOSE)
        assert own.is_contiguous()


@pytest.mark.parametrize("tiles", [None, LinearTiles(16, 64, 32, 2, 3, False), LinearTiles(16, 64, 16, 3, 3, True)])
@pytest.mark.parametrize("rows, inner", [(3, 80), (33, 96)])
def test_parts_add_up_to_the_product(rows, inner, tiles):
    x, module = noise(rows, inner, dtype=DTYPE), linear(inner, 128)
    found = small_batch_split_k(x, module, tiles)
    assert found.dtype == torch.float32 and len(found) == (tiles.parts if tiles else 4)
    torch.testing.assert_close(found.sum(0), module(x).float(), **CLOSE)


@pytest.mark.parametrize(
    "width, biased, normed, tiles",
    [
        (64, False, False, None),
        (64, True, False, LinearTiles(16, 32, 32, 1, 3, False)),
        (128, True, False, LinearTiles(16, 64, 64, 1, 3, True)),
        (64, False, True, LinearTiles(32, 64, 32, 1, 3, False)),
        (128, False, True, None),
    ],
)
def test_heads_are_rotated_and_stored_as_by_kernels_of_their_own(width, biased, normed, tiles):
    rows, inner, counts, page = 21, 80, (3, 1, 1), 8
    x, modules = noise(rows, inner, dtype=DTYPE), [linear(inner, n * width, biased) for n in counts]
    angles = noise(rows, width // 2, seed=4).repeat(1, 2)
    cos, sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    places = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:rows].to(DEVICE)
    norms = (noise(width, dtype=DTYPE), noise(width, seed=1, dtype=DTYPE), 1e-6) if normed else None
    found_pages, pages = (torch.zeros(2, 8, page, 1, width, device=DEVICE, dtype=DTYPE) for _ in range(2))
    found = small_batch_qkv_rope(x, modules, (cos, sin), *found_pages, places, norms, tiles)
    query, key, value = (module(x).unflatten(1, (-1, width)).contiguous() for module in modules)
    rope_and_cache(query, key, value, cos, sin, *pages, places, norms)
    torch.testing.assert_close(found, torch.cat([query, key, value], 1).flatten(1), **CLOSE)
    torch.testing.assert_close(found_pages, pages, **CLOSE)


def test_what_is_not_a_plain_half_precision_product_of_few_rows_is_left_to_others():
    x, module = noise(4, 64, dtype=torch.bfloat16), linear(64, 128).to(torch.bfloat16)
    assert few_rows_apply(x, [module])
    assert not few_rows_apply(x.float(), [module])
    assert not few_rows_apply(noise(65, 64, dtype=torch.bfloat16), [module])
    assert not few_rows_apply(x, [module, linear(64, 128, bias=True).to(torch.bfloat16)])
    assert not few_rows_apply(x, [linear(64, 96).to(torch.bfloat16)])
    hook = module.register_forward_pre_hook(lambda module, given: None)  # as with tensor parallelism
    assert not few_rows_apply(x, [module])
    hook.remove()
    assert few_rows_apply(x, [module])
    module.forward = lambda x: x
    assert not few_rows_apply(x, [module])
