"""What answers of an engine are compared with, and what stands for a device's recordings."""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.data.batches import TokenBatch
from trimtab.models.attention import LayerAttention, attend_masked
from trimtab.rollout.builtin import attention
from trimtab.rollout.sampling import SamplingParams


def trained_log_probs(policy, answers, temperature=1.0) -> torch.Tensor:
    """The trainer's, of all tokens of these answers."""
    whole = [np.array(a.prompt_ids + a.ids) for a in answers]
    batch = TokenBatch.of([(ids, np.arange(len(ids)) >= len(a.prompt_ids)) for ids, a in zip(whole, answers)])
    with torch.no_grad():
        return policy(batch.to(policy.device), temperature=temperature).log_probs_N.cpu()


def sampled_log_probs(answers, name="log_probs") -> torch.Tensor:
    return torch.from_numpy(np.concatenate([getattr(a, name) for a in answers]))


def check_log_probs(policy, answers, temperature=1.0, name="log_probs") -> None:
    """That they are the trainer's."""
    expected = trained_log_probs(policy, answers, temperature)
    torch.testing.assert_close(sampled_log_probs(answers, name), expected, atol=1e-5, rtol=1e-5)


def ids_of(answers) -> list[list[int]]:
    return [a.ids for a in answers]


def fill_adapters(model, spread) -> None:
    """So that they change what the model says."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=spread)


def converse(engine, texts) -> list:
    """All answers of conversations, each of which goes on until its text is long."""
    found = []
    with engine.session(SamplingParams(max_new_tokens=5)) as session:
        for number, ids in enumerate(texts):
            session.add(ids, seed=number)
        for rollout in session:
            found.append(rollout)
            if len(rollout.prompt_ids) < 30:
                session.add(rollout.prompt_ids + rollout.ids + [7, 8, 9][: 1 + rollout.prompt % 3], seed=3)
    assert len(found) > 10
    return found


class DoneAgain:
    """A recording, which is replayed by doing the work again."""

    def __init__(self, work, pool):
        work()
        self.replay, self.pool = work, lambda: None


def decode_without_host(monkeypatch) -> None:
    """Let decode steps attend to whole block tables, as the kernel does: the usual way on a CPU looks at lengths."""

    def decode(self, current, query_BHD, layer, arguments):
        keys, values = (
            t[layer][current.tables_BP].flatten(1, 2).transpose(1, 2) for t in (self.cache.keys, self.cache.values)
        )
        settings = LayerAttention.of(arguments, query_BHD)
        seen = settings.seen(current.lengths_B - 1, torch.arange(keys.shape[2]))[:, None, None]
        query, how = query_BHD[:, :, None], (settings.scale, settings.softcap)
        sinks = None if settings.sinks is None else settings.sinks.view(-1, 1, 1)
        return attend_masked(query, keys, values, seen, *how, sinks=sinks)[:, :, 0]

    monkeypatch.setattr(attention.CachedAttention, "_decode_by_kernel", decode)
    monkeypatch.setattr(attention, "has_kernels", lambda device: True)


class RecordedOperations(TorchDispatchMode):
    """A recording as a device makes it: the operations on the very tensors they had. What the host does between them is
    not repeated, and nothing may wait for a number."""

    def __init__(self, work, pool):
        super().__init__()
        self.pool, self.operations = lambda: None, []
        work()  # before a recording, as on a device
        with self:
            work()

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        sized_by_data = torch.Tag.dynamic_output_shape in operation.tags
        if operation is torch.ops.aten.index.Tensor:
            sized_by_data = any(index is not None and index.dtype == torch.bool for index in arguments[1])
        if sized_by_data or torch.Tag.data_dependent_output in operation.tags:
            raise RuntimeError(f"{operation} waits for the device")
        out = operation(*arguments, **(named or {}))
        returned = [found.alias_info for found in operation._schema.returns]
        # A view goes on showing the same memory.
        if not any(alias is not None and not alias.is_write for alias in returned):
            self.operations.append((operation, arguments, named or {}, tree_leaves(out)))
        return out

    def replay(self):
        for operation, arguments, named, kept in self.operations:
            for old, new in zip(kept, tree_leaves(operation(*arguments, **named)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
