"""Losses and gradients of suffixes against Hugging Face's own forward pass."""

import numpy as np
import pytest
import torch

from tests.tiny import VOCABULARY, tiny_model
from trimtab.evaluate.gcg_attack import SuffixLoss, Surroundings, target_log_probs
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path

AROUND = Surroundings(before=[5, 9, 11, 4], after=[8, 3], target=[20, 7, 31])


def suffixes(count=7, length=5, seed=0):
    return np.random.default_rng(seed).integers(3, VOCABULARY, (count, length)).tolist()


def policy_of(family):
    policy = Policy(tiny_model(family))
    choose_path(policy)
    return policy


def expected_loss(model, vectors_1TD) -> torch.Tensor:
    logits = model(inputs_embeds=vectors_1TD, use_cache=False).logits[0].float()
    places = torch.arange(len(vectors_1TD[0]) - 4, len(vectors_1TD[0]) - 1)
    return -logits.log_softmax(-1)[places, torch.tensor(AROUND.target)].mean()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bloom"])
def test_shared_and_separate_prefixes_give_hugging_faces_losses(family):
    policy, model = policy_of(family), tiny_model(family, attn_implementation="eager")
    embedding = model.get_input_embeddings()
    expected = []
    for suffix in suffixes():
        ids = torch.tensor([[*AROUND.before, *suffix, *AROUND.after, *AROUND.target]])
        with torch.no_grad():
            expected.append(expected_loss(model, embedding(ids)).item())
    shared = SuffixLoss(policy, AROUND, batch_size=3).of(suffixes())
    separate = SuffixLoss(policy, AROUND, share_prefix=False).of(suffixes())
    assert shared == pytest.approx(expected, abs=2e-5)
    assert shared == pytest.approx(separate, abs=1e-5)


def test_the_prefix_stands_in_a_pass_once(monkeypatch):
    policy, seen = policy_of("llama"), []
    forward = Policy.forward
    monkeypatch.setattr(
        Policy, "forward", lambda self, batch, **k: seen.append(batch.tokens) or forward(self, batch, **k)
    )
    SuffixLoss(policy, AROUND).of(suffixes())
    SuffixLoss(policy, AROUND, share_prefix=False).of(suffixes())
    assert seen == [4 + 7 * 10, 7 * 14]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_gradient_is_that_of_the_one_hot_suffix(family):
    policy, model = policy_of(family), tiny_model(family, attn_implementation="eager")
    (suffix,) = suffixes(1)
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        before, after = (embedding(torch.tensor([ids])) for ids in (AROUND.before, [*AROUND.after, *AROUND.target]))
    choice = torch.eye(VOCABULARY)[suffix].requires_grad_()
    scale = getattr(embedding, "embed_scale", 1.0)  # Gemma's embedding multiplies: the order of tokens is the same
    loss = expected_loss(model, torch.cat([before, (scale * choice @ embedding.weight.detach())[None], after], 1))
    (expected,) = torch.autograd.grad(loss, choice)
    found = SuffixLoss(policy, AROUND).gradient(suffix)
    torch.testing.assert_close(scale * found, expected, atol=1e-4, rtol=1e-3)
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_greedy_says_whether_the_model_would_answer_the_target():
    policy = policy_of("llama")
    (suffix,) = suffixes(1)
    prompt = [*AROUND.before, *suffix, *AROUND.after]
    policy.inner.generation_config.eos_token_id = None
    model = tiny_model()
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=3, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    answer = out[0, len(prompt) :].tolist()
    assert SuffixLoss(policy, Surroundings(AROUND.before, AROUND.after, answer)).is_greedy(suffix)
    other = [*answer[:2], (answer[2] + 1) % VOCABULARY]
    assert not SuffixLoss(policy, Surroundings(AROUND.before, AROUND.after, other)).is_greedy(suffix)


def test_target_log_probs_are_those_of_the_loss():
    policy = policy_of("llama")
    (suffix,) = suffixes(1)
    found = target_log_probs(policy, [*AROUND.before, *suffix, *AROUND.after], AROUND.target)
    (loss,) = SuffixLoss(policy, AROUND).of([suffix])
    assert (found["mean"], found["sum"]) == pytest.approx((-loss, -3 * loss), abs=1e-5)
    first = Surroundings(AROUND.before, AROUND.after, AROUND.target[:1])
    assert found["first"] == pytest.approx(-SuffixLoss(policy, first).of([suffix])[0], abs=1e-5)
