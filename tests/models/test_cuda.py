"""The accelerator's own paths; skipped where there is none."""

import pytest
import torch

from tests.samples import batch_of, spans_of
from tests.tiny import tiny_model
from trimtab.config.jobs import SFTOptions
from trimtab.data.batches import Span
from trimtab.distributed.process_group import Peers
from trimtab.models import attention
from trimtab.models.activation_memory import ActivationOffload, enable_gradient_checkpointing
from trimtab.models.attention import LayerAttention
from trimtab.models.packed import cast_parameters
from trimtab.models.parallel.context_parallel import ContextParallel, ContextRow
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_varlen_attention_equals_dense_blocks(window, kv_heads):
    lengths = [9, 1, 33, 8, 30]

    torch.manual_seed(0)
    make = lambda heads: torch.randn(1, sum(lengths), heads, 32, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    inputs = [make(h).transpose(1, 2).requires_grad_() for h in (4, kv_heads, kv_heads)]
    row = attention.PackedRow.of(spans_of(lengths), torch.device("cuda"))
    ours = row.attend(*inputs, {"scaling": 0.2, "sliding_window": window})
    tokens = [x.float().transpose(1, 2)[0] for x in inputs]
    expected = row.attend_dense(*tokens, LayerAttention(0.2, window, None))[None]
    torch.testing.assert_close(ours.float(), expected, atol=2e-2, rtol=2e-2)
    upstream = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, upstream.bfloat16()), torch.autograd.grad(expected, inputs, upstream)
    ):
        assert (mine - theirs).float().norm() / theirs.float().norm() < 2e-2


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("processes", [2, 4])
def test_shares_of_a_row_attend_as_the_whole(window, processes):
    """Also to a borrowed prompt; keys and values as they are when they have been gathered."""
    spans = [Span(0, 40), Span(40, 24, 0, 21), Span(64, 1), Span(65, 192)]
    torch.manual_seed(0)
    query, key, value = (torch.randn(257, heads, 32, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    inputs = [x.requires_grad_() for x in (query, key, value)]
    whole = attention.PackedRow.of(spans, torch.device("cuda"))
    arguments = {"scaling": 0.2, "sliding_window": window}
    expected = whole.attend(*(x.transpose(0, 1)[None] for x in inputs), arguments)[0]
    ours = torch.zeros_like(expected)
    for process in range(processes):
        row = ContextRow(spans, ContextParallel(Peers(process, processes), 1), torch.device("cuda"))
        out = row.attend_gathered(query[row.rows], key, value, LayerAttention(0.2, window, None))
        ours = ours.index_copy(0, row.rows[: row.tokens], out[: row.tokens])
    torch.testing.assert_close(ours, expected, atol=2e-2, rtol=2e-2)
    upstream = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
    ):
        assert (mine - theirs).float().norm() / theirs.float().norm() < 2e-2


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "mixtral", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_follow_the_cpu(family, dtype):
    batch = batch_of([40, 3, 17, 39])
    on_cpu = Policy(tiny_model(family))
    choose_path(on_cpu)
    expected = on_cpu(batch).log_probs_N
    model = tiny_model(family)
    cast_parameters(model, dtype)
    policy = Policy(model.cuda())
    assert choose_path(policy).path == "packed"
    ours = policy(batch.to(torch.device("cuda"))).log_probs_N.cpu()
    error = (ours - expected).abs()
    assert error.max() < 1e-3 if dtype == torch.float32 else error.mean() < 0.1


@pytest.fixture
def repeatable():
    """Sums of gradients in an order that is always the same."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_activations_in_main_memory_change_no_gradient_and_free_the_device(repeatable):
    """Layers' inputs go out and come back beside the computing, on a stream of their own."""
    batch, found, held = batch_of([60] * 60).to(torch.device("cuda")), [], []
    for away in (False, True):
        policy = Policy(tiny_model("llama", num_hidden_layers=12).cuda())
        choose_path(policy)
        enable_gradient_checkpointing(policy, SFTOptions(gradient_checkpointing=True))
        policy.activations = ActivationOffload(policy, small=2**16) if away else None
        policy.train()
        before = torch.cuda.memory_allocated()
        loss = policy(batch).log_probs_N.sum()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        found.append([parameter.grad for parameter in policy.parameters()])
    for here, there in zip(*found):
        torch.testing.assert_close(there, here, atol=0, rtol=0)
    inputs = 12 * 3600 * 32 * 4
    assert held[0] - held[1] > 0.8 * inputs


@pytest.mark.parametrize("keep", ["attention", "products"])
def test_what_layers_keep_changes_no_gradient(keep, repeatable):
    batch, found = batch_of([40, 3, 17, 39]).to(torch.device("cuda")), []
    for options in (SFTOptions(), SFTOptions(gradient_checkpointing=True, gradient_checkpointing_keep=keep)):
        model = tiny_model("llama")
        cast_parameters(model, torch.bfloat16)
        policy = Policy(model.cuda())
        choose_path(policy)
        enable_gradient_checkpointing(policy, options)
        policy.train()(batch).log_probs_N.sum().backward()
        found.append([parameter.grad for parameter in policy.parameters()])
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)
