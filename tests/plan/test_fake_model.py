"""What a pass of a fake model takes against what real tensors take."""

import numpy as np
import pytest
import torch

from tests.tiny import tiny_model
from trimtab.config.jobs import SFTOptions
from trimtab.data.batches import TokenBatch
from trimtab.models.activation_memory import enable_gradient_checkpointing
from trimtab.models.packed import cast_parameters
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.plan.fake_model import FakeModel, LiveBytes, PlannedModel
from trimtab.plan.hardware import NAMED
from trimtab.plan.layouts import Split
from trimtab.plan.memory import ProcessMemory
from trimtab.plan.workload import JobModel, RowShape, Work
from trimtab.train.optimizer import Optimizer

SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4}


def skeleton(family: str, **changes) -> Policy:
    with torch.device("meta"):
        return Policy(tiny_model(family, **SHAPE, **changes))


def real(family: str, **changes) -> Policy:
    model = Policy(tiny_model(family, **SHAPE, **changes))
    assert choose_path(model).path == "packed"
    return model.train()


def planned(family: str, options: SFTOptions, **changes) -> PlannedModel:
    found = JobModel("model", "model", skeleton(family, **changes), trained=True)
    return PlannedModel(options, RowShape(0, 64), found, lambda: skeleton(family, **changes))


def process(model: PlannedModel, options: SFTOptions) -> ProcessMemory:
    return ProcessMemory(options, NAMED["H200"], Work(RowShape(0, 64), 256, 64), Split.of(options, 1), [model])


def saved_bytes(model: Policy, batch: TokenBatch) -> int:
    """What autograd really keeps for the backward pass, without parameters: each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(batch).log_probs_N.sum()
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3"])
@pytest.mark.parametrize("tokens", [300, 700])
def test_activations_are_those_that_autograd_keeps(family, tokens):
    rows = RowShape(prompt=40, answer=60, group=2)
    said = FakeModel(skeleton(family), SFTOptions(), accelerator=False).training_pass(rows, tokens)
    really = saved_bytes(real(family), TokenBatch.of(*rows.examples(tokens)))
    assert said.kept == pytest.approx(really, rel=0.15)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "mistral"])
def test_an_accelerator_keeps_what_a_cpu_keeps_but_for_copies_that_attention_makes(family):
    rows, options = RowShape(0, 100), SFTOptions()
    here, there = (
        FakeModel(skeleton(family), options, accelerator=a).training_pass(rows, 700).kept for a in (False, True)
    )
    assert 0.7 * here < there < 1.02 * here


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_fake_pass_takes_what_the_real_one_takes(checkpointing):
    """The same counting of live storages, over real tensors with contents."""
    rows, options = RowShape(0, 128), SFTOptions(gradient_checkpointing=checkpointing)
    said = FakeModel(skeleton("llama"), options, accelerator=False).training_pass(rows, 512)
    model = real("llama")
    if checkpointing:
        enable_gradient_checkpointing(model, options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in model.parameters()]
    batch = TokenBatch.of(*rows.examples(512))
    with LiveBytes([*model.parameters(), *model.buffers(), *gradients]) as live:
        model(batch).log_probs_N.sum().backward()
    assert said.peak == pytest.approx(live.peak, rel=0.01)


def test_weights_masters_and_gradient_sums_are_those_of_the_optimiser():
    options = SFTOptions(bf16=True)
    said = planned("llama_tied", options)
    parts = {part.name: part.size for part in process(said, options).at(64).parts}
    model = real("llama_tied")
    cast_parameters(model, torch.bfloat16)
    optimiser = Optimizer(model.model, options, 1, learning_rate=1e-3, fused=False)
    model(TokenBatch.of(*RowShape(0, 30).examples(60))).log_probs_N.sum().backward()
    gradients = sum(g.nbytes for g in optimiser.accumulated.values())
    optimiser.step(0)
    moments = [t for state in optimiser.adam.state.values() for k, t in state.items() if k.startswith("exp_avg")]
    assert said.weights == parts["model: working weights"] == sum(p.nbytes for p in model.parameters())
    assert parts["model: fp32 masters"] == sum(m.nbytes for m in optimiser.masters.values())
    assert parts["model: gradient sums"] == gradients
    assert parts["model: Adam's moments"] == 8 * said.learnt == sum(m.nbytes for m in moments)


def test_the_momentum_of_muon_is_that_of_the_optimiser():
    options = SFTOptions(bf16=True, optimizer="muon")
    said = planned("llama_tied", options)
    parts = {part.name: part.size for part in process(said, options).at(64).parts}
    model = real("llama_tied")
    optimiser = Optimizer(model.model, options, 1, learning_rate=1e-3, fused=False)
    model(TokenBatch.of(*RowShape(0, 30).examples(60))).log_probs_N.sum().backward()
    optimiser.step(0)
    moments = {name: tensor.nbytes for name, tensor in optimiser.state().items() if tensor.ndim}
    of_muon = sum(size for name, size in moments.items() if name.startswith("momentum_buffer"))
    assert parts["model: Muon's momentum"] == of_muon > 0
    assert parts["model: Adam's moments"] == sum(size for n, size in moments.items() if n.startswith("exp_avg")) > 0


def test_what_the_files_hold_is_not_what_is_worked_with():
    with torch.device("meta"):
        half = Policy(tiny_model("llama").bfloat16())
        whole = Policy(tiny_model("llama"))
    sizes = [
        PlannedModel(SFTOptions(), RowShape(0, 64), JobModel("it", "it", model), None).weights
        for model in (half, whole)
    ]
    assert sizes[0] == sizes[1] == 4 * sum(p.numel() for p in whole.parameters())


def test_checkpointing_keeps_a_fraction_and_scoring_keeps_nothing():
    rows, deep = RowShape(0, 128), {"num_hidden_layers": 8}
    plain = FakeModel(skeleton("llama", **deep), SFTOptions(bf16=True), accelerator=True)
    frugal = FakeModel(skeleton("llama", **deep), SFTOptions(bf16=True, gradient_checkpointing=True), accelerator=True)
    kept = plain.training_pass(rows, 4096).kept
    assert frugal.training_pass(rows, 4096).kept < 0.2 * kept
    assert plain.scoring_pass(rows, 4096) < 0.3 * kept


def test_activations_in_main_memory_take_no_room_on_an_accelerator():
    rows, many = RowShape(0, 512), 2**16
    kept = []
    for away in (False, True):
        options = SFTOptions(bf16=True, gradient_checkpointing=True, offload_activations=away)
        deep = skeleton("llama", num_hidden_layers=8, max_position_embeddings=512)
        kept.append(FakeModel(deep, options, accelerator=True).training_pass(rows, many).kept)
    inputs = 8 * many * 32 * 2
    assert kept[0] - kept[1] > 0.9 * inputs


def test_activations_grow_with_tokens_and_not_with_the_length_of_sequences():
    model = FakeModel(skeleton("llama", max_position_embeddings=4096), SFTOptions(bf16=True), accelerator=True)
    short, long = (model.training_pass(RowShape(0, length), 2048).kept for length in (64, 1024))
    assert short == pytest.approx(long, rel=0.03)
    assert model.training_pass(RowShape(0, 64), 4096).kept == pytest.approx(2 * short, rel=0.02)


def test_a_row_has_the_tokens_that_were_asked_for_and_shares_prompts():
    batch = TokenBatch.of(*RowShape(prompt=10, answer=5, group=3).examples(55))
    assert batch.tokens == 55
    assert [s.prefix_length for s in batch.spans] == [0, 10, 10, 0, 10, 10, 0]
    assert np.array_equal(batch.ids_T, np.zeros(55))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_of_equal_layers_follows_from_two_short_ones(checkpointing):
    options = SFTOptions(bf16=True, gradient_checkpointing=checkpointing)
    said, rows = planned("llama", options, num_hidden_layers=6), RowShape(0, 64)
    whole = FakeModel(skeleton("llama", num_hidden_layers=6), options, accelerator=True)
    for tokens in (192, 256):
        for recomputed in (None, 0, 2, 6) if checkpointing else (None, 0):
            short, really = said.training_bytes(tokens, recomputed), whole.training_pass(rows, tokens, recomputed)
            assert short.kept == pytest.approx(really.kept, rel=0.001)
            assert short.peak == pytest.approx(really.peak, rel=0.01)
    assert said.root_weights + 6 * said.layer_weights == said.weights
