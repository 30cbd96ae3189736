"""What the processes of a test do that work on one row together: the same as one process alone."""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from tests.models.splitting import load_split, options_of, values
from tests.tiny import tiny_model
from trimtab.algos.supervised_losses import load_balancing_loss
from trimtab.config.training_options import BackwardOptions
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import find_device
from trimtab.distributed.fsdp import shard, whole
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.models.activation_memory import enable_gradient_checkpointing
from trimtab.models.attention import NAME, register
from trimtab.models.packed import PackedModel
from trimtab.models.parallel.context_parallel import ContextParallel
from trimtab.models.parallel.sharded_model import decoder_layers, mesh_of
from trimtab.models.policy import Policy, Teacher
from trimtab.models.reward import Critic, RewardModel

PACKED = ((14, 0), (9, 0), (1, 0), (22, 0), (15, 0))  # (tokens, borrowed ones among them) of every sequence
BORROWED = ((19, 0), (24, 11), (16, 11), (12, 0), (13, 3), (3, 3))
ONE_ROW = ((257, 0),)
CHECKPOINTING = {"gradient_checkpointing": True}


@dataclass(frozen=True)
class Case:
    family: str = "llama"
    sequences: tuple[tuple[int, int], ...] = BORROWED
    stride: int = 1
    root: type[PackedModel] = Policy
    backward: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


CASES = {
    "one key head": Case(changes={"num_key_value_heads": 1}),
    "all heads at once": Case(stride=2),
    "three heads": Case(
        sequences=PACKED, changes={"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}, stride=3
    ),
    "window": Case("mistral", changes={"sliding_window": 7}),
    "soft caps and windows": Case("gemma2", changes={"attn_logit_softcapping": 2.0}),
    "one tied row": Case("qwen3", ONE_ROW, changes={"tie_word_embeddings": True, "max_position_embeddings": 300}),
    "experts": Case("mixtral"),
    "checkpointing": Case("mixtral", backward=CHECKPOINTING),
    "attention kept": Case(backward=CHECKPOINTING | {"gradient_checkpointing_keep": "attention"}),
    "split": Case(backward=CHECKPOINTING, sharded=True),
    "fewer tokens than chunks": Case(sequences=((3, 0),)),
    "scores": Case(root=RewardModel),
    "values": Case(root=Critic, sharded=True),
}


def batch_of(sequences):
    rng = np.random.default_rng(0)
    examples, prompt = [], None
    for length, borrowed in sequences:
        ids = rng.integers(3, 60, length)
        if borrowed:
            ids[:borrowed] = prompt[:borrowed]
        else:
            prompt = ids
        examples.append((ids, np.arange(length) >= max(borrowed, length // 3)))
    return TokenBatch.of(examples, [borrowed for _, borrowed in sequences])


def root_of(case):
    model = tiny_model(case.family, **case.changes)
    if case.root is not Policy:
        model.config.num_labels = 1
        torch.manual_seed(1)
        classifier = AutoModelForSequenceClassification.from_config(model.config)
        classifier.model.load_state_dict(model.model.state_dict())
        model = classifier
    register()
    model.set_attn_implementation(NAME)
    return case.root(model).train()


def outcome(root, batch, case):
    """Everything that is read off, one after another, and the gradient of a loss in which all of it counts."""
    weights = torch.linspace(-1, 2, 10_000)
    if case.root is Policy:
        router = case.family == "mixtral"
        out = root(batch, temperature=0.7, entropy=True, router=router)
        found = [out.log_probs_N, out.entropy_N]
        if router:
            found.append(load_balancing_loss(out.router_logits, 2, root.sum_over_row)[None])
    elif case.root is RewardModel:
        found = [root(batch).scores_S]
    else:
        found = [root(batch)]
    flat = torch.cat(found)
    factor = 1 if root.context is None or not case.sharded else root.context.peers.size
    ((flat * weights[: len(flat)]).sum() * factor).backward()
    gradients = {name: p.grad for name, p in root.named_parameters() if p.grad is not None}
    return flat.detach(), gradients


def with_teacher(root, batch):
    """What distillation and judging by choices read off, without a gradient."""
    choices = torch.tensor([4, 9, 17])
    with torch.no_grad():
        hidden_ND = root(batch, hidden_only=True).hidden_ND
        teacher = Teacher(hidden_ND, root.head, root.logit_shape, lambda student, teacher: (student * teacher).sum(-1))
        out = root(batch, teacher=teacher)
        return torch.cat([out.divergence_N / 100, root(batch, choices_K=choices).choices_NK.flatten()])


def compare(names):
    world = find_world(find_device())
    mesh = Mesh(world, context=world.size)
    for name in names:
        case = CASES[name]
        batch, alone = batch_of(case.sequences), root_of(case)
        shared = copy.deepcopy(alone)
        expected, expected_gradients = outcome(alone, batch, case)
        shared.context = ContextParallel(mesh.context, case.stride)
        enable_gradient_checkpointing(shared, BackwardOptions(**case.backward))
        if case.sharded:
            shard(shared, decoder_layers(shared), mesh, zero_stage=3)
        found, gradients = outcome(shared, batch, case)
        close(found, expected, 1e-6, name)
        assert gradients.keys() == expected_gradients.keys(), name
        for parameter, gradient in gradients.items():
            gradient = whole(gradient) if case.sharded else mesh.context.sum(gradient)
            close(gradient, expected_gradients[parameter], 1e-5, f"{name}: {parameter}")
        if case.root is Policy and not case.sharded:
            close(with_teacher(shared, batch), with_teacher(alone, batch), 1e-5, f"{name}: teacher")
    leave_world()


def compare_loaded(cases):
    """The same of models that four processes load: two and two share every layer, two and two every row. `cases`:
    (job, folder, words) each."""
    world = find_world(find_device())
    for job, model, words in cases:
        options = options_of(job, model, f"{words} --ring_attn_size 2 --ds_tensor_parallel_size 2")
        mesh = mesh_of(options, world)
        shared, alone = load_split(job, options, mesh).model, load_split(job, options, None, whole=True).model
        batch, found = batch_of(BORROWED), []
        for root in (shared, alone):
            read_off = values(root, batch)
            (read_off.square().sum() * (1 if root is alone else mesh.gradients.size)).backward()
            found.append((read_off, {name: p.grad for name, p in root.named_parameters() if p.grad is not None}))
        (first, first_gradients), (second, second_gradients) = found
        close(first, second, 1e-5, f"{model} {words}")
        assert first_gradients.keys() == second_gradients.keys()
        for name, gradient in first_gradients.items():
            close(whole(gradient), second_gradients[name], 1e-5, f"{model} {words}: {name}")
    leave_world()


def close(found, expected, tolerance, what):
    assert found.shape == expected.shape, what
    if found.numel():
        difference = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        assert difference < tolerance, f"{what}: {difference:.2g}"
