"""Four processes that split a model in two ways learn what one does: --zpg, --shard_size, --overlap_comm."""

import numpy as np
import pytest
import torch

from tests import warm
from tests.models.splitting import load_split, options_of, values
from tests.train.job_run import write_model
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import find_device
from trimtab.distributed.fsdp import local, reshard_model, whole
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.models.activation_memory import ActivationOffload
from trimtab.models.packed import scoring
from trimtab.models.parallel.sharded_model import mesh_of

SETTINGS = [
    ("llama", "--zpg 2 --overlap_comm"),
    ("llama", "--shard_size 2 --lora_rank 4 --overlap_comm"),
    ("llama_tied", "--zpg 2 --gradient_checkpointing --gradient_checkpointing_keep products"),
    ("mixtral", "--shard_size 2 --zero_stage 2 --gradient_checkpointing --offload_activations"),
]
LENGTHS = ((9, 14), (6,), (5, 8), (11, 3))  # of the sequences in every process's row


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in {family for family, _ in SETTINGS}:
        write_model(folder / family, family)
    return folder


def batches():
    draw = torch.Generator().manual_seed(0)
    ids = [[torch.randint(5, 20, (length,), generator=draw).numpy() for length in row] for row in LENGTHS]
    return [TokenBatch.of([(own, np.arange(len(own)) >= 1) for own in row]) for row in ids]


def gradients(model, rows, factor):
    for row in rows:
        (values(model, row).sum() * factor).backward()
    reshard_model(model)
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def learn_in_four(folder):
    world = find_world(find_device())
    for family, words in SETTINGS:
        options = options_of("sft", str(folder / family), words)
        mesh = mesh_of(options, world)
        make_group, torch.distributed.new_group = torch.distributed.new_group, None  # a mesh has all that are needed
        model = load_split("sft", options, mesh).model
        torch.distributed.new_group = make_group
        if options.offload_activations:  # which on a CPU has no effect
            model.activations = ActivationOffload(model, small=0)
        row = batches()[mesh.data.rank]
        projection = model.inner.model.layers[0].self_attn.o_proj
        weight = projection.base_layer if options.lora_rank else projection
        rows, split = weight.weight.shape[0], 2 if options.shard_size else 4
        assert local(weight.weight).shape[0] == rows // split
        with scoring(model):
            first = values(model, row)
        if options.zpg > 1:  # the neighbours keep it between them
            assert local(weight.weight).shape[0] == rows // 2
        found = gradients(model, [row], mesh.gradients.size)
        assert local(weight.weight).shape[0] == rows // split
        alone = load_split("sft", options, None, whole=True).model
        with scoring(alone):
            torch.testing.assert_close(first, values(alone, row))
        expected = gradients(alone, batches(), 1)
        assert found.keys() == expected.keys()
        for name in expected:
            difference = (found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-20)
            assert difference < 1e-5, (family, words, name, difference)
    leave_world()


def test_four_processes_learn_what_one_does(folder):
    assert warm.call_world(learn_in_four, 4, folder) == [0] * 4
