from types import SimpleNamespace

import pytest
import torch

from tests.samples import spans_of
from trimtab.models import attention
from trimtab.models.attention import PackedPass, PackedRow, UnsupportedAttention, packed_attention, window_mask


def naive(query, key, value, lengths, scale, window=None, softcap=None, chunk=None, sinks=None):
    """Attention of each sample alone, from its definition."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outputs, start = [], 0
    for length in lengths:
        q, k, v = (x[0, :, start : start + length] for x in (query, key, value))
        scores = q @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        i = torch.arange(length)
        seen = i[:, None] >= i
        if window is not None:
            seen &= i[:, None] - i < window
        if chunk is not None:
            seen &= i[:, None] // chunk == i // chunk
        weights = torch.where(seen, scores.exp(), 0.0)
        weights = weights / (weights.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks.exp()[:, None, None]))
        outputs.append(weights @ v)
        start += length
    return torch.cat(outputs, 1).transpose(0, 1)[None]


def module_in(lengths):
    """A module in a pass over samples of these lengths."""
    module = torch.nn.Linear(1, 1)
    PackedPass().begin(module, PackedRow.of(spans_of(lengths), torch.device("cpu")))
    return module


def tensors(tokens, heads=4, kv_heads=2, width=8):
    torch.manual_seed(0)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, width))
    return [torch.randn(1, tokens, h, d).transpose(1, 2).requires_grad_() for h, d in shapes]


@pytest.mark.parametrize("lengths", [[7], [1, 1, 1], [9, 8, 3, 9, 1], [20, 2, 19, 3, 18]])
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"window": 4}, {"softcap": 2.0}, {"window": 4, "softcap": 2.0}),
        *({"chunk": 4}, {"sinks": True}, {"sinks": True, "window": 4}, {"sinks": True, "chunk": 3, "softcap": 2.0}),
    ],
)
def test_packed_samples_attend_as_if_each_were_alone(lengths, options):
    inputs = tensors(sum(lengths))
    if "sinks" in options:
        inputs.append(torch.randn(4, requires_grad=True))
        options = options | {"sinks": inputs[3]}
    size = options.get("chunk") or options.get("window")
    config = SimpleNamespace(attention_chunk_size=options.get("chunk"))
    mask = window_mask(device=torch.device("cpu"), config=config, local_size=size)
    arguments = {"softcap": options.get("softcap"), "s_aux": options.get("sinks")}
    ours, _ = packed_attention(module_in(lengths), *inputs[:3], mask, scaling=0.3, **arguments)
    expected = naive(*inputs[:3], lengths, 0.3, **options)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    upstream = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_changing_one_sample_leaves_the_others_untouched():
    lengths = [6, 5, 6]
    query, key, value = (x.detach() for x in tensors(sum(lengths)))
    module = module_in(lengths)
    before, _ = packed_attention(module, query, key, value, None, scaling=1.0)
    key = key.clone()
    key[:, :, 6:11] += 1
    after, _ = packed_attention(module, query, key, value, None, scaling=1.0)
    changed = (before != after).flatten(2).any(2)[0]
    assert changed[6:11].any() and not changed[:6].any() and not changed[11:].any()


def test_an_argument_we_would_drop_is_refused():
    query, key, value = tensors(4)
    with pytest.raises(UnsupportedAttention, match=r"position_bias \(a position bias\)"):
        packed_attention(module_in([4]), query, key, value, None, position_bias=torch.zeros(4))
    with pytest.raises(UnsupportedAttention, match="mask"):
        packed_attention(module_in([4]), query, key, value, torch.zeros(1, 1, 4, 4))


def test_attention_of_sequences_of_any_length_needs_no_dense_blocks():
    row = PackedRow.of(spans_of([5, 3]), torch.device("meta"))
    query, key, value = (x.to("meta", torch.bfloat16) for x in tensors(8))
    assert row.attend(query, key, value, {}).shape == (1, 8, 4, 8)
    assert "dense" not in vars(row)


def test_sinks_after_attention_without_them_give_the_values_and_gradients_of_attention_with_them():
    """As on a GPU, where flash attention knows no sinks; here by torch's flash attention for CPUs."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, 3, 9, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    sinks = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    given = [x.clone().requires_grad_() for x in (query, key, value, sinks)]
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    scores = (given[0] @ given[1].transpose(2, 3) * 0.3).masked_fill(~seen, float("-inf"))
    scores = torch.cat([scores, given[3][None, :, None, None].expand(1, 3, 9, 1)], -1)
    expected = scores.softmax(-1)[..., :9] @ given[2]
    slopes = torch.autograd.grad(expected, given, grad)

    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    plain, sums = flash(query, key, value, 0.0, True, scale=0.3)
    out, with_them = attention.with_sinks(plain[0].transpose(0, 1), sums[0], sinks)
    torch.testing.assert_close(out.transpose(0, 1)[None], expected.detach(), atol=1e-6, rtol=1e-6)
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    backs = back(
        grad, query, key, value, out.transpose(0, 1)[None].contiguous(), with_them[None].to(sums.dtype), 0.0, True,
        scale=0.3,
    )  # fmt: skip
    for found, slope in zip(backs, slopes):
        torch.testing.assert_close(found, slope, atol=1e-6, rtol=1e-5)
    of_sinks = attention.gradient_of_sinks(grad[0].transpose(0, 1), out, with_them, sinks)
    torch.testing.assert_close(of_sinks, slopes[3], atol=1e-5, rtol=1e-5)
