"""What the processes of a test do with a model whose layers are cut over them."""

import copy

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.models.splitting import gradients, load_split, options_of, some_batch, values
from trimtab.distributed import process_group as collectives
from trimtab.distributed.device import find_device
from trimtab.distributed.fsdp import keep_shard, whole
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.models.lm_head import LogitShape, choice_log_probs, token_divergence, token_log_probs, whole_logits
from trimtab.models.packed import scoring
from trimtab.models.parallel import tensor_parallel
from trimtab.models.parallel.sharded_model import mesh_of
from trimtab.models.parallel.tensor_parallel import VocabParallelHead

CUT = "--ds_tensor_parallel_size 2"
PRECISION = 1e-5  # of the largest gradient of a parameter


def compare_with_one_process(cases):
    """`cases`: (job, folder, words) each."""
    world = find_world(find_device())
    problems = [problem for case in cases for problem in differences(world, *case)]
    assert not problems, "\n".join(problems[:20])
    leave_world()


def differences(world, job, model, words):
    """Between the gradients of one packed batch: of the model read in parts and cut, and of one process's."""
    options = options_of(job, model, f"{words} {CUT}")
    mesh = mesh_of(options, world)
    split = load_split(job, options, mesh).model
    alone = load_split(job, options, None, whole=True).model
    fill_adapters(split, alone)
    batch, name = some_batch(), f"{model} {words}"
    with torch.no_grad(), scoring(split), scoring(alone):
        off = (values(split, batch) - values(alone, batch)).abs().max().item()
    if not off < PRECISION:
        yield f"{name}: values differ by {off:.1e}"
    state = torch.get_rng_state()
    found = {parameter: whole(gradient) for parameter, gradient in split_gradients(split, batch, mesh).items()}
    torch.set_rng_state(state)
    expected = gradients(alone, batch)
    if found.keys() != expected.keys():
        yield f"{name}: {sorted(found.keys() ^ expected.keys())}"
        return
    for parameter, gradient in expected.items():
        off = relative(found[parameter], gradient)
        if not off <= PRECISION:
            yield f"{name}: {parameter} differs by {off:.1e}"


def fill_adapters(*models):
    """The second matrix of every adapter begins at 0, and the first one's gradient would be 0 too."""
    for model in models:
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                with torch.no_grad():
                    keep_shard(0.2 * torch.randn(parameter.shape, generator=generator), parameter)


def split_gradients(model, batch, mesh):
    """Processes that share a row each give the gradient of their part of it, and the mean of those is taken."""
    (values(model, batch).sum() * mesh.context.size).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(found, expected):
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()


def plant_faults(qwen3, one_key, mixtral, llama, llama_of_three_keys):
    """Every one of these mistakes is noticed."""
    world = find_world(find_device())
    alike = lambda tensor, group: tensor  # noqa: E731
    local = lambda parameter: parameter.to_local()  # noqa: E731
    whole_dropout = lambda self, x: nn.functional.dropout(x, self.p, self.training)  # noqa: E731
    faults = [
        (tensor_parallel, "group_copy", alike, qwen3, ""),
        (tensor_parallel, "_with_partial_gradient", local, qwen3, ""),
        (tensor_parallel, "_with_partial_gradient", local, one_key, ""),
        (tensor_parallel.ParallelExperts, "enter", lambda self, *arguments: arguments, mixtral, ""),
        (collectives, "all_reduce", lambda tensor, group: None, llama, ""),
        (tensor_parallel.LoraDown, "leave", lambda self, result: result, llama, "--lora_rank 4"),
        (tensor_parallel.ShardedDropout, "forward", whole_dropout, llama, "--lora_rank 4 --lora_dropout 0.2"),
        (tensor_parallel, "key_value_heads_used", lambda *_: [0], llama_of_three_keys, ""),
    ]
    for place, name, fault, model, words in faults:
        right = getattr(place, name)
        setattr(place, name, fault)
        try:
            assert list(differences(world, "sft", model, words)), f"nobody notices {name}"
        finally:
            setattr(place, name, right)
    leave_world()


def compare_heads():
    """Log-probs, entropies, choices and divergences of a head that is cut, with their gradients."""
    world = find_world(find_device())
    mesh = mesh_of(options_of("sft", "none", CUT), world).for_tensor_parallel()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(29, 16, generator=generator)
    targets = torch.randint(0, 61, (29,), generator=generator)
    upstream = torch.randn(2, 29, generator=generator)
    shapes = [LogitShape(), LogitShape(0.5, 3.0)]
    for bias in (False, True):
        head = nn.Linear(16, 61, bias=bias)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        for shape in shapes:

            def log_probs(hidden, head, shape=shape):
                found, entropies = token_log_probs(
                    hidden, head, targets, shape=shape, temperature=0.7, entropy=True, chunk=8
                )
                return torch.stack([found, entropies]) * upstream

            def plain(hidden, head, shape=shape):
                return token_log_probs(hidden, head, targets, shape=shape, chunk=8)[0] * upstream[0]

            def choices(hidden, head, shape=shape):
                return choice_log_probs(hidden, head, torch.tensor([3, 40, 60]), shape) * upstream[0, :, None]

            def divergence(hidden, head, shape=shape):
                gap = lambda a, b: (a.log_softmax(-1) - b.log_softmax(-1)).square().sum(-1)  # noqa: E731
                return token_divergence(hidden, head, shape, hidden.detach() + 1, head, shape, gap) * upstream[0]

            for quantity in (log_probs, plain, choices, divergence):
                found, expected = (_with_gradients(quantity, hidden, h) for h in (_cut(head, mesh), head))
                for value, right in zip(found, expected, strict=True):
                    assert relative(value, right) < 1e-5, (quantity.__name__, shape, bias)
        with torch.no_grad():
            torch.testing.assert_close(whole_logits(hidden, _cut(head, mesh)), head(hidden))
    leave_world()


def _cut(head, mesh):
    head = copy.deepcopy(head)
    for name, parameter in list(head.named_parameters()):
        setattr(head, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)))
    VocabParallelHead(head, mesh.get_group())
    return head


def _with_gradients(quantity, hidden, head):
    hidden = hidden.clone().requires_grad_()
    head.zero_grad()
    value = quantity(hidden, head)
    value.sum().backward()
    return [value.detach(), hidden.grad, *(whole(p.grad) for p in head.parameters())]
