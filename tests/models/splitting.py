"""What the processes of a test do that load, run and save a split model."""

import errno
import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab.config.jobs import RMOptions, SFTOptions
from trimtab.config.parser import parse
from trimtab.config.resolved_config import settle
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import find_device
from trimtab.distributed.fsdp import local
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.distributed.random_state import seed_everything
from trimtab.errors import UserError
from trimtab.models import load
from trimtab.models.packed import scoring
from trimtab.models.parallel import sharded_checkpoint
from trimtab.models.parallel.sharded_model import mesh_of
from trimtab.models.proposal_policies import SharedBasePolicy
from trimtab.models.save import save_model

JOBS = {"sft": SFTOptions, "rm": RMOptions}


def options_of(job, model, words):
    fixed = f"--pretrain {model} --dataset none --zero_stage 3"
    options, _ = settle(parse(JOBS[job], f"{fixed} {words}".split()))
    return options


@contextmanager
def joined(job, model, words=""):
    """The options of a job and the mesh of the processes, which join for it and leave."""
    options = options_of(job, model, words)
    yield options, mesh_of(options, find_world(find_device()))
    leave_world()


def load_split(job, options, mesh, *, whole=False):
    """`whole`: loaded whole by every process, then split."""
    seed_everything(7, deterministic=False)
    begin, load_whole = load.begin_sharded_load, load._load_whole
    if whole:
        load.begin_sharded_load = lambda *args, **more: None
    else:
        load._load_whole = None  # nobody calls it
    try:
        if job == "rm":
            return load.load_reward_model(options, find_device(), load_tokenizer(options.pretrain), mesh)
        return load.load_policy(options, find_device(), mesh)
    finally:
        load.begin_sharded_load, load._load_whole = begin, load_whole


def some_batch():
    rng = np.random.default_rng(0)
    examples = [(rng.integers(5, 40, length), np.arange(length) >= 3) for length in (9, 14, 6)]
    return TokenBatch.of(examples)


def values(model, batch):
    out = model(batch)
    return out.scores_S if hasattr(out, "scores_S") else out.log_probs_N


def gradients(model, batch):
    values(model, batch).sum().backward()
    return {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def compare(job, model, words):
    with joined(job, model, words) as (options, mesh):
        parts, whole = (load_split(job, options, mesh, whole=whole) for whole in (False, True))
        state = torch.get_rng_state()
        assert parts.verdict.path == whole.verdict.path == "packed"
        assert parts.weights == whole.weights
        first, second = (dict(loaded.model.named_parameters(remove_duplicate=False)) for loaded in (parts, whole))
        assert first.keys() == second.keys()
        for name in first:
            half = options.bf16 and not first[name].requires_grad
            assert first[name].dtype == second[name].dtype == (torch.bfloat16 if half else torch.float32), name
            assert first[name].requires_grad == second[name].requires_grad, name
            assert torch.equal(local(first[name]), local(second[name])), name
        ties = [len({id(p) for p in found.values()}) for found in (first, second)]
        assert ties[0] == ties[1]
        for name, buffer in whole.model.named_buffers():
            assert torch.equal(parts.model.get_buffer(name), buffer), name
        batch = some_batch()
        with torch.random.fork_rng(), scoring(parts.model), scoring(whole.model):
            assert torch.equal(values(parts.model, batch), values(whole.model, batch))
        found = []
        for loaded in (parts, whole):
            torch.set_rng_state(state)
            found.append(gradients(loaded.model, batch))
        assert found[0].keys() == found[1].keys() and found[0]
        for name in found[0]:
            assert torch.equal(found[0][name], found[1][name]), name


def compare_loaded(model, words):
    """However it is read."""
    with joined("sft", model, words) as (options, mesh):
        found, whole = load.load_policy(options, find_device(), mesh), load_split("sft", options, mesh, whole=True)
        with scoring(found.model), scoring(whole.model):
            assert torch.equal(values(found.model, some_batch()), values(whole.model, some_batch()))


def compare_frozen(job, model, words):
    """A model that only scores."""
    with joined(job, model, words) as (options, mesh):
        begin, found = load.begin_sharded_load, []
        for whole in (False, True):
            load.begin_sharded_load = (lambda *args, **more: None) if whole else begin
            if job == "rm":
                arguments = (model, options, find_device(), load_tokenizer(model))
                found.append(load.load_frozen_reward_model(*arguments, mesh=mesh))
            else:
                found.append(load.load_frozen_policy(model, options, find_device(), mesh=mesh))
        first, second = (dict(loaded.model.named_parameters()) for loaded in found)
        assert first.keys() == second.keys()
        for name in first:
            assert first[name].dtype == second[name].dtype and not first[name].requires_grad
            assert torch.equal(local(first[name]), local(second[name])), name
        with scoring(found[0].model), scoring(found[1].model):
            assert torch.equal(values(found[0].model, some_batch()), values(found[1].model, some_batch()))


def borrow(model, parameters):
    """What a fresh proposal says on a split policy's weights is what the policy says. `parameters`: of the embedding
    and the output head together."""
    with joined("sft", model) as (options, mesh):
        owner = load_split("sft", options, mesh).model
        with scoring(owner):
            expected = values(owner, some_batch())
        borrowing = SharedBasePolicy(owner, RLOptions(lora_rank=4), find_device(), split=True)
        with torch.no_grad(), borrowing.at_work():
            assert torch.equal(values(borrowing.eval(), some_batch()), expected)
        inner = borrowing.inner
        assert len({id(inner.model.embed_tokens.weight), id(inner.lm_head.weight)}) == parameters


def refused(model, expected):
    with joined("sft", model) as (options, mesh):
        for whole in (False, True):
            with pytest.raises(UserError, match=expected):
                load_split("sft", options, mesh, whole=whole)


def read_whole(model):
    with joined("sft", model) as (options, mesh):
        seed_everything(7, deterministic=False)
        loaded = load.load_policy(options, find_device(), mesh)
        assert "cannot be read in parts" in loaded.notes[0]
        assert loaded.weights == load.load_policy(options, find_device()).weights


def save(job, model, words, folder, file_bytes):
    """Saved by all together, and by one process that holds it whole."""
    sharded_checkpoint.FILE_BYTES = file_bytes
    with joined(job, model, words) as (options, mesh):
        tokenizer = load_tokenizer(model)
        loaded = load_split(job, options, mesh)
        save_model(loaded.model, tokenizer, folder / "split", mesh=mesh, bf16=options.bf16)
        if mesh.is_rank_zero:
            alone = load_split(job, options, None, whole=True)
            save_model(alone.model, tokenizer, folder / "whole", bf16=options.bf16)


def save_over_machines(model, folder):
    """The second process is on a machine that does not see the first one's folder."""
    with joined("sft", model) as (options, mesh):
        loaded = load_split("sft", options, mesh)
        sharded_checkpoint.FILE_BYTES = 10_000
        if mesh.all.rank == 1:
            sharded_checkpoint.Path = lambda place: Path(f"/another machine/{place}")
        save_model(loaded.model, load_tokenizer(model), folder / "split", mesh=mesh)


def save_on_a_full_disk(model, folder, full_rank):
    with joined("sft", model) as (options, mesh):
        loaded = load_split("sft", options, mesh)
        sharded_checkpoint.FILE_BYTES = 10_000
        if mesh.all.rank == full_rank:
            sharded_checkpoint.SafetensorsWriter.write = no_room
        try:
            save_model(loaded.model, load_tokenizer(model), folder, mesh=mesh)
        except OSError as error:
            assert error.errno == errno.ENOSPC
        else:
            raise AssertionError("nobody noticed")


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
