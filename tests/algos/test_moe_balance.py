import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.samples import batch_of
from tests.tiny import tiny_model
from trimtab.algos.supervised_losses import load_balancing_loss
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path


def test_equals_hugging_faces_function_in_value_and_gradient():
    torch.manual_seed(0)
    layers = tuple(torch.randn(11, 6, requires_grad=True) for _ in range(3))
    ours, theirs = load_balancing_loss(layers, 2), load_balancing_loss_func(layers, 6, 2)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, layers), torch.autograd.grad(theirs, layers))


def test_is_the_top_k_when_experts_are_used_evenly():
    router = torch.eye(4).repeat(3, 1) * 1e-6  # each expert first equally often, probabilities even
    assert abs(load_balancing_loss((router,), 1).item() - 1.0) < 1e-5


def test_routers_of_packed_and_padded_batches_agree():
    for family in ("mixtral", "qwen2_moe"):
        losses = []
        for allowed in (True, False):
            policy = Policy(tiny_model(family))
            choose_path(policy, packed_allowed=allowed)
            routers = policy(batch_of([12, 3, 11, 7]), router=True).router_logits
            assert len(routers) == 2 and routers[0].shape == (33, 4)
            losses.append(load_balancing_loss(routers, 2))
        torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
