import pytest
import torch

from tests.samples import batch_of
from tests.tiny import FAMILIES, tiny_model
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path

PADDED = {"bloom", "falcon"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_a_path_whose_log_probs_are_hugging_faces(family):
    policy = Policy(tiny_model(family))
    verdict = choose_path(policy)
    assert verdict.path == ("padded" if family in PADDED else "packed"), verdict
    batch = batch_of([12, 3, 11, 7])
    ours = policy(batch).log_probs_N
    expected = []
    policy.causal.set_attn_implementation("eager")
    for ids, trained in zip(batch.ids_T.split(batch.lengths), batch.trained_T.split(batch.lengths)):
        log_probs = policy.causal(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        expected.append(log_probs.gather(1, ids[1:, None])[:, 0][trained[1:]])
    torch.testing.assert_close(ours, torch.cat(expected), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2"])
def test_packed_and_padded_paths_give_the_same_gradients(family):
    batch = batch_of([12, 3, 11, 7])
    gradients = []
    for allowed in (True, False):
        policy = Policy(tiny_model(family, attn_implementation="eager"))
        assert choose_path(policy, packed_allowed=allowed).path == ("packed" if allowed else "padded")
        policy(batch).log_probs_N.sum().backward()
        gradients.append({n: p.grad for n, p in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        scale = gradient.abs().max().clamp(min=1e-6)
        assert (gradient - gradients[1][name]).abs().max() / scale < 1e-4, name


def test_a_head_we_do_not_know_is_read_from_the_models_own_logits(monkeypatch):
    model = tiny_model("llama")
    plain = type(model).forward

    def doubled(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        out.logits = out.logits * 2
        return out

    monkeypatch.setattr(type(model), "forward", doubled)
    policy = Policy(model)
    verdict = choose_path(policy)
    assert verdict.path == "logits" and "differ" in verdict.reason
    batch = batch_of([6, 4])
    entropy = policy(batch, entropy=True).entropy_N
    assert entropy.shape == batch.targets_N.shape and (entropy > 0).all()


def test_the_check_restores_training_mode():
    policy = Policy(tiny_model("llama")).train()
    choose_path(policy)
    assert policy.training and policy.causal.training
