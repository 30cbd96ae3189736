"""Triton kernels against plain torch. Without an accelerator they run in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from tests.rollout.kernel_device import DEVICE, DTYPE
from trimtab.models import lm_head
from trimtab.models.layer_kernels import fused_add_rms_norm, gated, rope_and_cache
from trimtab.models.lm_head import LogitShape
from trimtab.rollout.builtin import sampler
from trimtab.rollout.builtin.kernels.decode_step import sample_temperature_only
from trimtab.rollout.builtin.kernels.fused_linear import gated_linear, merged_linear
from trimtab.rollout.builtin.kernels.int8_linear import Int8Tiles, added, dequantize_int8, int8_gated, int8_product
from trimtab.rollout.builtin.kernels.paged_attention import paged_attention
from trimtab.rollout.builtin.linear import Int8Weight, packed, quantize_int8
from trimtab.rollout.builtin.sampler import PerRequestSampler, Sampler
from trimtab.rollout.sampling import SamplingParams


def noise(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    "heads, kv_heads, widths, page, options",
    [
        (6, 2, (64, 64), 16, {}),
        (4, 4, (8, 8), 64, {}),
        (15, 5, (24, 24), 8, {"softcap": 3.0, "window": 21}),
        (2, 1, (16, 16), 32, {"window": 40}),
        (4, 4, (48, 32), 16, {}),
        (4, 2, (24, 72), 8, {"window": 21}),
        (6, 2, (16, 16), 16, {"sinks": True, "window": 21}),
        (6, 2, (16, 16), 16, {"sinks": True, "chunk": 64}),
        (4, 4, (8, 8), 8, {"chunk": 10}),
    ],
)
def test_decode_attention_equals_torch_over_the_same_pages(heads, kv_heads, widths, page, options, splits):
    """`widths`: of keys and of values."""
    lengths = torch.tensor([1, 16, 77, 130, 64, 65])
    pages = -(-int(lengths.max()) // page)
    keys, values = (noise(40 * 64 // page, page, kv_heads, width, seed=i) for i, width in enumerate(widths))
    generator = torch.Generator().manual_seed(2)
    tables = torch.stack([torch.randperm(len(keys) - 1, generator=generator)[:pages] + 1 for _ in lengths]).to(DEVICE)
    query = noise(len(lengths), heads, widths[0], seed=3)
    softcap, window, chunk = (options.get(name) for name in ("softcap", "window", "chunk"))
    sinks = noise(heads, seed=4) if "sinks" in options else None
    keys[0] = float("nan")  # a page nobody holds must not be read
    out = paged_attention(
        query, keys, values, tables, lengths.to(DEVICE), scale=0.3, softcap=softcap, window=window, chunk=chunk,
        sinks=sinks, splits=splits,
    )  # fmt: skip
    for row, length in enumerate(lengths.tolist()):
        first = max(0, length - window) if window else (length - 1) // chunk * chunk if chunk else 0
        k, v = (
            t[tables[row]].flatten(0, 1)[first:length].repeat_interleave(heads // kv_heads, 1) for t in (keys, values)
        )
        scores = torch.einsum("hd,thd->ht", query[row], k) * 0.3
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None]))
        expected = torch.einsum("ht,thd->hd", weights, v)
        torch.testing.assert_close(out[row], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16][: 1 + (DEVICE != "cpu")])
def test_norm_adds_to_the_stream_and_rounds_like_hugging_face(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(96, 1e-5).to(DEVICE, dtype)
    norm.weight.data = noise(96, dtype=dtype)
    new, stream = noise(7, 96, dtype=dtype), noise(7, 96, seed=1, dtype=dtype)
    summed = stream + new
    out = fused_add_rms_norm(new, stream, norm.weight, 1e-5)
    assert torch.equal(stream, summed)
    torch.testing.assert_close(out, norm(summed), atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 8e-3)
    torch.testing.assert_close(fused_add_rms_norm(None, stream, norm.weight, 1e-5), out)


@pytest.mark.parametrize("normed", [False, True])
def test_rotary_positions_equal_hugging_faces_and_land_in_their_pages(normed):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    tokens, heads, kv_heads, width, page = 5, 6, 2, 24, 8
    packed = noise(tokens, (heads + 2 * kv_heads) * width)
    query, key, value = (
        part.unflatten(1, (-1, width)) for part in packed.split([heads * width, kv_heads * width, kv_heads * width], 1)
    )
    angles = noise(tokens, width // 2, seed=4).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    places = torch.tensor([9, 10, 63, 16, 31], device=DEVICE)
    keys, values = torch.zeros(2, 9, page, kv_heads, width, device=DEVICE)
    norms, q, k, v = None, query.clone(), key.clone(), value.clone()
    if normed:
        modules = [LlamaRMSNorm(width, 1e-6).to(DEVICE) for _ in range(2)]
        for seed, module in enumerate(modules):
            module.weight.data = noise(width, seed=seed)
        q, k = modules[0](q), modules[1](k)
        norms = modules[0].weight, modules[1].weight, 1e-6
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    rope_and_cache(query, key, value, cos, sin, keys, values, places, norms)
    torch.testing.assert_close(query, q)
    torch.testing.assert_close(key, k)
    torch.testing.assert_close(keys.flatten(0, 1)[places], k)
    torch.testing.assert_close(values.flatten(0, 1)[places], v)
    assert keys.count_nonzero() == tokens * kv_heads * width


def test_gating_equals_silu_times_up():
    both = noise(3, 200)
    torch.testing.assert_close(gated(both[:, :100], both[:, 100:]), F.silu(both[:, :100]) * both[:, 100:])


@pytest.mark.parametrize("biased", [False, True])
def test_joined_products_equal_separate_ones(biased):
    x = noise(70, 72, dtype=DTYPE)
    modules = [torch.nn.Linear(72, n, bias=biased, device=DEVICE, dtype=DTYPE) for n in (192, 64, 128)]
    close = {"atol": 1e-5, "rtol": 1e-5} if DEVICE == "cpu" else {"atol": 2e-2, "rtol": 2e-2}
    with torch.no_grad():
        expected = torch.cat([module(x) for module in modules], 1)
        torch.testing.assert_close(merged_linear(x, modules), expected, **close)
        if not biased:
            up = torch.nn.Linear(72, 192, bias=False, device=DEVICE, dtype=DTYPE)
            expected = F.silu(modules[0](x)) * up(x)
            torch.testing.assert_close(gated_linear(x, modules[0], up), expected, **close)


def int8_weight(outputs, inner, seed=0, bias=None):
    codes, scales = quantize_int8(noise(outputs, inner, seed=seed))
    return Int8Weight(packed(codes), scales, bias, inner), codes.double() * scales[:, None].double()


# 48 words make half a step of the inner dimension, and leave a third part nothing to do.
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "rows, tiles", [(1, None), (20, Int8Tiles(16, 64, 32, 3, 4, 3)), (70, Int8Tiles(32, 64, 16, 2, 2, 3))]
)
def test_int8_products_are_those_of_the_rounded_weights(rows, tiles, biased):
    x = noise(rows, 96, dtype=DTYPE)
    biases = [noise(n, dtype=DTYPE) if biased else None for n in (128, 64, 64)]
    made = [int8_weight(n, 96, seed, bias) for seed, (n, bias) in enumerate(zip((128, 64, 64), biases))]
    weights, wide = zip(*made)
    expected = torch.cat([x.double() @ w.T + (0 if b is None else b.double()) for w, b in zip(wide, biases)], 1)
    close = {"atol": 1e-4, "rtol": 1e-5} if DEVICE == "cpu" else {"atol": 2e-2, "rtol": 1e-2}
    for given, width in ((list(weights), 256), ([weights[0]], 128)):
        found = int8_product(x, given, parts=True, tiles=tiles)
        assert (found.ndim == 3) == (tiles is not None)
        torch.testing.assert_close(added(found, DTYPE).double(), expected[:, :width], **close)
    if not biased:
        (gate, gate_wide), (up, up_wide) = int8_weight(64, 96, 5), int8_weight(64, 96, 6)
        expected = F.silu(x.double() @ gate_wide.T) * (x.double() @ up_wide.T)
        found = int8_gated(x, gate, up, tiles=tiles)
        torch.testing.assert_close(found.double(), expected, atol=close["atol"] * 10, rtol=close["rtol"] * 2)


@pytest.mark.parametrize("inner", [256, 255])
def test_every_int8_code_is_unpacked_exactly(inner):
    codes = torch.arange(-127, 128, dtype=torch.int8).repeat(6)[: 5 * inner].view(5, inner).to(DEVICE)
    weight = Int8Weight(packed(codes), torch.ones(5, device=DEVICE), None, inner)
    for dtype in [torch.float32, torch.float16, torch.bfloat16][: 1 if DEVICE == "cpu" else 3]:
        assert torch.equal(dequantize_int8(weight, dtype), codes.to(dtype))


def test_parts_of_a_sum_are_added_to_the_stream_as_their_sum():
    parts, weight = noise(3, 5, 96), noise(96)
    streams = [noise(5, 96, seed=1) for _ in range(2)]
    found = (
        fused_add_rms_norm(parts, streams[0], weight, 1e-5),
        fused_add_rms_norm(parts.sum(0), streams[1], weight, 1e-5),
    )
    torch.testing.assert_close(*streams)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("vocabulary, temperature", [(61, 1.0), (5000, 0.7)])
def test_plain_drawing_gives_the_samplers_tokens_and_log_probs(vocabulary, temperature):
    rows = 64
    logits = noise(rows, vocabulary) * 3
    logits[:, 1] = float("-inf")
    seeds = torch.arange(rows, device=DEVICE) * 7_919_000_000_000_000 - 3
    drawn = torch.arange(rows, device=DEVICE) % 5
    tokens, log_probs = sample_temperature_only(logits, seeds, drawn, temperature)
    plain = Sampler(SamplingParams(temperature=temperature), vocabulary, torch.device("cpu"))
    expected = plain.draw(logits.cpu(), seeds.cpu(), drawn.cpu(), None)
    assert torch.equal(tokens.cpu(), expected.tokens_B)
    torch.testing.assert_close(log_probs.cpu(), expected.log_probs_B, atol=1e-5, rtol=1e-5)


def test_rows_with_temperatures_of_their_own_draw_what_they_draw_alone():
    heats, logits = torch.tensor([0.3, 1.0, 2.5, 0.7], device=DEVICE), noise(4, 5000)
    seeds = torch.arange(4, device=DEVICE) * 7_919_000_000_000_000 - 3
    tokens, log_probs = sample_temperature_only(logits, seeds, seeds * 0, torch.stack([heats, heats], 1)[:, 1])
    for row, heat in enumerate(heats.tolist()):
        one = slice(row, row + 1)
        own, own_log_probs = sample_temperature_only(logits[one], seeds[one], seeds[one] * 0, heat)
        assert tokens[row] == own[0] and log_probs[row] == own_log_probs[0]


@pytest.mark.parametrize("plain", [False, True])
def test_rows_by_kernel_draw_what_they_draw_without_it(plain, monkeypatch):
    settings = [SamplingParams(temperature=heat, plain_log_probs=plain) for heat in (0.0, 1.0, 0.4, 0.0, 2.0)]
    logits, seeds = noise(5, 5000), torch.arange(5, device=DEVICE)
    by_rows = PerRequestSampler(settings, torch.device(DEVICE))
    monkeypatch.setattr(sampler, "has_kernels", lambda device: False)
    expected = by_rows.draw(logits, seeds, seeds + 3, None)
    monkeypatch.setattr(sampler, "has_kernels", lambda device: True)
    found = by_rows.draw(logits, seeds, seeds + 3, None)
    assert torch.equal(found.tokens_B, expected.tokens_B)
    torch.testing.assert_close(found.log_probs_B, expected.log_probs_B, atol=1e-5, rtol=1e-5)
    assert (found.plain_B is None) == (not plain)
    if plain:
        torch.testing.assert_close(found.plain_B, expected.plain_B, atol=1e-5, rtol=1e-5)


def test_rows_with_filters_have_the_log_probs_of_their_temperatures_bit_for_bit(monkeypatch):
    heats = (0.7, 1.0, 0.3)
    settings = [SamplingParams(temperature=heat, top_p=0.9, top_k=50) for heat in heats]
    logits, seeds = noise(3, 5000), torch.arange(3, device=DEVICE)
    for module in (sampler, lm_head):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    found = PerRequestSampler(settings, torch.device(DEVICE)).draw(logits, seeds, seeds + 3, None)
    for row, heat in enumerate(heats):
        one = slice(row, row + 1)
        chosen, normaliser, _ = lm_head.read_logits(logits[one], found.tokens_B[one], LogitShape(), heat, False)
        assert found.log_probs_B[row] == (chosen - normaliser)[0]


def test_plain_drawing_passes_on_that_logits_are_not_numbers():
    logits = noise(3, 5000)
    logits[1, 4000] = float("nan")
    zeros = torch.zeros(3, dtype=torch.long, device=DEVICE)
    tokens, log_probs = sample_temperature_only(logits, zeros, zeros, 1.0)
    assert log_probs.isnan().tolist() == [False, True, False] and 0 <= int(tokens[1]) < 5000
