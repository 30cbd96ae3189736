"""What the processes of a test do with a model whose layers are cut over them."""

import torch

from tests.models.splitting import gradients, load_split, options_of, some_batch, values
from trimtab.distributed.device import find_device
from trimtab.distributed.sharding import whole
from trimtab.distributed.world import find_world, leave_world
from trimtab.models.packed import scoring
from trimtab.models.sharded import mesh_of

CUT = "--ds_tensor_parallel_size 2"


def whole_gradients(model, batch):
    values(model, batch).sum().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def compare_with_one_process(cases, cut=CUT):
    """`cases`: (job, folder, words) each. Gradients of one packed batch, of the model read in parts."""
    world, problems = find_world(find_device()), []
    for job, model, words in cases:
        options = options_of(job, model, f"{words} {cut}")
        mesh = mesh_of(options, world)
        split, alone = load_split(job, options, mesh).model, load_split(job, options, None, whole=True).model
        batch = some_batch()
        with torch.no_grad(), scoring(split), scoring(alone):
            off = (values(split, batch) - values(alone, batch)).abs().max().item()
        if not off < 1e-5:
            problems.append(f"{model} {words}: values differ by {off:.1e}")
        state = torch.get_rng_state()
        found = whole_gradients(split, batch)
        torch.set_rng_state(state)
        expected = gradients(alone, batch)
        if found.keys() != expected.keys():
            problems.append(f"{model} {words}: {found.keys() ^ expected.keys()}")
            continue
        for name in found:
            off = (found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-12)
            if not off <= 1e-5:
                problems.append(f"{model} {words}: {name} differs by {off:.1e}")
    assert not problems, "\n".join(problems[:20])
    leave_world()
