"""--optimizer muon: torch's own Muon bit for bit, whole or in shards, and which parameters have it."""

import re
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests import warm
from tests.tiny import tiny_model
from tests.train.every_loop import signal_in_step, words
from tests.train.job_run import weights, write_model
from tests.train.test_optimizer import settings
from trimtab.algos.muon import orthogonalised
from trimtab.config.training_options import LoraOptions
from trimtab.distributed.device import find_device
from trimtab.distributed.fsdp import whole
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.errors import UserError
from trimtab.models.lora import add_adapters
from trimtab.train.checkpoint import HostTensors
from trimtab.train.optimizer import Muon, Optimizer, hidden_matrices

SHAPES = [(8, 8), (24, 8), (8, 24), (1, 5), (16, 3), (5, 7), (9, 9)]
CPU = torch.device("cpu")


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def torch_muon(scale, steps=4):
    """The matrices after some steps of torch's optimizer."""
    matrices = [nn.Parameter(drawn(shape, i)) for i, shape in enumerate(SHAPES)]
    optimizer = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=scale)
    for step in range(steps):
        for i, matrix in enumerate(matrices):
            matrix.grad = drawn(matrix.shape, 100 * step + i)
        optimizer.step()
    return [matrix.detach() for matrix in matrices]


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_a_matrix_has_the_updates_of_torchs_muon_bit_for_bit(scale):
    matrices = [nn.Parameter(drawn(shape, i)) for i, shape in enumerate(SHAPES)]
    optimizer = Muon(matrices, 0.02, 0.1, 0.9, scale, CPU)
    for step in range(4):
        for i, matrix in enumerate(matrices):
            matrix.grad = drawn(matrix.shape, 100 * step + i)
        optimizer.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(matrices, torch_muon(scale), strict=True))


@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64)])
def test_singular_values_come_near_1_and_vectors_stay(shape):
    update = drawn(shape, 3)
    left, _, right = torch.linalg.svd(update, full_matrices=False)
    turned = left.T @ orthogonalised(update).float() @ right.T
    values = turned.diagonal()
    small = shape[0] == shape[1]  # a square matrix has very small ones, which five steps do not bring there
    assert values.median() > 0.6 and values.max() < 1.3 and (small or values.min() > 0.6)
    assert (turned - values.diag()).abs().max() < 0.05


def split_in_processes() -> None:
    """Shards by rows, by columns, uneven ones, and copies: each as the whole matrix."""
    mesh = Mesh(find_world(find_device())).for_sharding()
    ways = [(Shard(0),), (Shard(1),), (Shard(0),), (Shard(0),), (Replicate(),), (Shard(1),), None]
    place = lambda tensor, way: tensor if way is None else distribute_tensor(tensor, mesh, way)  # noqa: E731
    matrices = [nn.Parameter(place(drawn(shape, i), way)) for i, (shape, way) in enumerate(zip(SHAPES, ways))]
    optimizer = Muon(matrices, 0.02, 0.1, 0.9, "match_rms_adamw", CPU)
    for step in range(4):
        for i, (matrix, way) in enumerate(zip(matrices, ways)):
            matrix.grad = place(drawn(SHAPES[i], 100 * step + i), way)
        optimizer.step()
    assert isinstance(optimizer.state[matrices[0]]["momentum_buffer"], DTensor), "a shard, as the weights"
    for ours, theirs in zip(matrices, torch_muon("match_rms_adamw"), strict=True):
        assert torch.equal(whole(ours.detach()), theirs)
    leave_world()


@pytest.mark.parametrize("processes", [2, 3])
def test_shards_are_updated_as_the_whole_matrix(processes):
    assert warm.call_world(split_in_processes, processes) == [0] * processes


# ---- a model's parameters


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_matrices_of_layers_have_muon_and_all_else_adam():
    model = tiny_model("llama")
    others = trained(model) - set(hidden_matrices(model))
    assert {re.sub(r"\d+", "N", name) for name in others} == {
        *("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"),
        *(f"model.layers.N.{name}_layernorm.weight" for name in ("input", "post_attention")),
    }


def test_stacked_experts_have_adam_and_adapters_muon():
    model = tiny_model("mixtral")
    others = trained(model) - set(hidden_matrices(model))
    assert any(".experts." in name for name in others) and not any("self_attn" in name for name in others)
    adapted = add_adapters(tiny_model("llama"), LoraOptions(lora_rank=2))
    found = hidden_matrices(adapted)
    assert set(found) == trained(adapted) and {name.split(".")[-3] for name in found} == {"lora_A", "lora_B"}


@pytest.mark.parametrize(
    "family, changes, states",
    [
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, ("gate_up_proj_bias", "sinks")),
        ("mamba", {"state_size": 4}, ("A_log", "conv1d.weight")),
    ],
)
def test_stacked_biases_and_states_have_adam(family, changes, states):
    model = tiny_model(family, **changes)
    found = set(hidden_matrices(model))
    assert found and all(name.endswith(".weight") for name in found) and not any(".experts." in name for name in found)
    assert all(any(name.endswith(state) for name in trained(model) - found) for state in states)


def test_a_model_without_layers_is_refused():
    with pytest.raises(UserError, match="--optimizer muon: Linear trains no matrix of a decoder layer; use adamw"):
        Optimizer(nn.Linear(3, 3), settings(optimizer="muon"), 1, learning_rate=1e-2, fused=False)


def backward(model, seed):
    ids = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()


def make(model, **changes):
    options = settings(optimizer="muon", **changes)
    return Optimizer(model, options, 10, learning_rate=options.learning_rate, fused=False)


def test_a_model_has_the_steps_of_torchs_two_optimizers_after_one_clip():
    ours, theirs = tiny_model("llama"), tiny_model("llama")
    optimizer, hidden = make(ours, max_norm=0.1), set(hidden_matrices(theirs))
    by_name = dict(theirs.named_parameters())
    rest = {name: p for name, p in by_name.items() if name not in hidden}
    decayed = [p for p in rest.values() if p.ndim >= 2]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in rest.values() if p.ndim < 2]}],
        lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0,
    )  # fmt: skip
    muon = torch.optim.Muon([by_name[n] for n in hidden], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        backward(ours, step)
        backward(theirs, step)
        norm = float(nn.utils.get_total_norm([p.grad for p in theirs.parameters()]))
        for p in theirs.parameters():
            p.grad.mul_(min(1.0, 0.1 / (norm + 1e-6)))
        adam.step()
        muon.step()
        theirs.zero_grad()
        assert optimizer.step(step).applied
    for name, p in ours.named_parameters():
        assert torch.equal(p, by_name[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sleep_and_a_restored_state_change_nothing(dtype):
    plain, other = tiny_model("llama").to(dtype), tiny_model("llama").to(dtype)
    optimizer, before = make(plain), make(other)
    for step in range(2):
        for model, own in ((plain, optimizer), (other, before)):
            backward(model, step)
            own.step(step)
        before.sleep()
        before.wake()
    assert before.state_bytes == sum(tensor.nbytes for tensor in before.state().values() if tensor.ndim)
    fresh = tiny_model("llama").to(dtype)
    after = make(fresh)
    after.restore(HostTensors(before.state()))
    for model, own in ((plain, optimizer), (fresh, after)):
        backward(model, 7)
        own.step(2)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fresh.parameters(), strict=True))


# ---- whole runs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Without dropout, which is each process's own."""
    write_model(folder := tmp_path_factory.mktemp("model"))
    return folder


def test_two_processes_learn_what_one_learns(tasks, model, tmp_path):
    shared = f"--pretrain {model} --optimizer muon --learning_rate 2e-5 --max_steps 3"
    assert warm.run(words(tasks, "sft", tmp_path / "one", shared)) == 0
    assert warm.run_world(words(tasks, "sft", tmp_path / "two", shared, "--zero_stage 3"), 2) == [0, 0]
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"), rtol=0, atol=1e-6)
    names = set(load_file(tmp_path / "one" / "checkpoints" / "global_step3" / "tensors.safetensors"))
    assert any(name.startswith("momentum_buffer/") for name in names)


def test_killed_and_resumed_by_two_processes_it_goes_on_as_one(tasks, model, tmp_path):
    """A checkpoint of one process is read by two: moments are shards of the same."""
    shared = f"--pretrain {model} --optimizer muon --learning_rate 2e-5 --max_steps 6"
    assert warm.run(words(tasks, "sft", tmp_path / "one", shared)) == 0
    given = words(tasks, "sft", tmp_path / "two", shared)
    assert warm.run(given, prepare=partial(signal_in_step, "sft", 4, signal.SIGKILL)) == -signal.SIGKILL
    assert warm.run_world([*given, "--load_checkpoint", "--zero_stage", "2"], 2) == [0, 0]
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"), rtol=0, atol=1e-6)


def test_a_checkpoint_of_the_other_optimizer_is_refused(tasks, tmp_path):
    given = words(tasks, "sft", tmp_path, "--max_steps 3")
    assert warm.run(given) == 0
    told = warm.output([*given, "--optimizer", "muon", "--max_steps", "6", "--load_checkpoint"], 2)
    assert "--optimizer was adamw there" in told


@pytest.mark.parametrize(
    "more, expected",
    [
        ("--optimizer moun", "--optimizer is moun: it must be adamw or muon"),
        ("--optimizer muon --muon_momentum 1", "--muon_momentum is 1: it must be at least 0 and below 1"),
        ("--optimizer muon --muon_scale rms", "--muon_scale is rms: it must be match_rms_adamw or original"),
    ],
)
def test_wrong_words(tasks, tmp_path, more, expected):
    assert expected in warm.output(words(tasks, "sft", tmp_path, more), 2)


def test_options_of_muon_without_it_are_told(tasks, tmp_path):
    told = warm.output(words(tasks, "sft", tmp_path, "--muon_momentum 0.9 --max_steps 1 --dry_run"))
    assert "--muon_momentum has no effect without --optimizer muon" in told
