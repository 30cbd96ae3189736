"""The reference that preference jobs compare the policy with: its log-probs of whole answers, without gradient.

With LoRA the reference is the policy with its adapters off, so there is no second copy. Otherwise it is a frozen model
of its own, kept in main memory between steps with --ref_offload.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from trimtab.data import token_cache
from trimtab.data.batches import TokenBatch
from trimtab.data.progress import progress
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.models.load import Loaded, TrainedModelOptions, load_frozen_policy
from trimtab.models.lora import adapters_off
from trimtab.models.parallel.sharded_model import FrozenPlacement, enable_context_parallel, is_frozen_sharded
from trimtab.models.policy import Policy
from trimtab.train.task import sums_by_sequence


def check_reference(task: Any) -> None:
    """Refuse a --ref_pretrain to which the data's token ids mean something else."""
    name = task.options.ref_pretrain
    if name is None:
        return
    ids = task.token_ids().tolist()
    theirs = load_tokenizer(name, disable_fast=task.options.disable_fast_tokenizer, flag="--ref_pretrain")
    for number, ours, other in zip(ids, *(t.convert_ids_to_tokens(ids) for t in (task.tokenizer, theirs))):
        if ours != other:
            raise UserError(
                f"--ref_pretrain {name}: its token {number} is {other!r}, --pretrain's is {ours!r}; "
                "a reference must have the same tokenizer"
            )


class Reference:
    def __init__(
        self,
        options: TrainedModelOptions,
        loaded: Loaded | None,
        device: Device,
        mesh: Mesh,
        *,
        pretrain: str | None,
        offload: bool,
    ):
        """`loaded`: the policy, which with LoRA is the reference too; `pretrain`: another model in place of what the
        policy was at the start."""
        self.device = device
        self.precision = "bf16" if options.bf16 else "fp32"
        self.adapters_off = options.lora_rank > 0 and pretrain is None
        split = None
        if not self.adapters_off:
            split = mesh if is_frozen_sharded(options, mesh, offload=offload) else None
            loaded = load_frozen_policy(pretrain or options.pretrain, options, device, mesh=split, offload=offload)
            enable_context_parallel(loaded.model, options, mesh, f"the model {pretrain or options.pretrain}")
        assert loaded is not None
        self.model, self.weights = loaded.model, loaded.weights
        self.keeping = FrozenPlacement(device, split, offload and not self.adapters_off)
        self.keeping.settle(self.model)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[Policy]:
        """The reference on the device, ready to score."""
        off = adapters_off(self.model.model) if self.adapters_off else contextlib.nullcontext()
        with off, self.keeping.at_work(self.model):
            yield self.model

    def log_probs(self, batches: Iterable[TokenBatch], temperature: float) -> list[Tensor]:
        """Log-probs of the trained tokens of every batch."""
        with self.at_work() as model:
            return [model(batch, temperature=temperature).log_probs_N for batch in batches]

    def score(self, batches: list[TokenBatch], name: str = "reference_S") -> None:
        """Put every sequence's log-prob into `extra[name]` of its batch."""
        with self.at_work() as model:
            for batch in batches:
                batch.extra[name] = sequence_log_probs(model, batch)


def sequence_log_probs(model: Policy, batch: TokenBatch) -> Tensor:
    return sums_by_sequence(model(batch).log_probs_N, batch)


def precomputed(reference: Reference, task: Any, *, evaluation: bool) -> np.ndarray:
    """Reference log-probs of every sample of a store [samples, sequences a sample], from disk if they are there."""
    store = task.evaluation if evaluation else task.store
    how = f"{reference.precision}/{reference.model.path}/{reference.device.torch.type}"
    key = f"{reference.weights}/{store.fingerprint}/{how}"
    name = f"reference-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"
    cached = token_cache.load(name)
    if not task.mesh.all.any(cached is None):  # who shares a row, or a model, cannot score alone
        assert cached is not None
        return cached[0]["log_probs"]
    found: dict[int, np.ndarray] = {}
    groups = task.cut_all(store, list(range(len(store))))
    with reference.at_work() as model:
        for samples in progress(groups, len(groups), "scoring with the reference"):
            batch = task.make_batch(store, samples).to(reference.device.torch)
            values = sequence_log_probs(model, batch).view(len(samples), -1).cpu().numpy()
            found.update(zip(samples, values))
    table = np.stack([found[i] for i in range(len(store))])
    token_cache.save(name, {"log_probs": table}, {})
    return table
