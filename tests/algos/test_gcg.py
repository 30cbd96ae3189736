import torch

from trimtab.algos.tail import candidate_suffixes, promising_tokens, token_gradient


def test_the_token_gradient_is_that_of_the_one_hot_choice():
    torch.manual_seed(0)
    embeddings, choice = torch.randn(7, 5), torch.eye(7)[[2, 4, 2]].requires_grad_()
    vectors = choice @ embeddings
    loss = (vectors**3).sum()
    (gradient_LD,) = torch.autograd.grad(loss, vectors, retain_graph=True)
    (expected,) = torch.autograd.grad(loss, choice)
    torch.testing.assert_close(token_gradient(gradient_LD, embeddings), expected)


def test_promising_tokens_are_the_most_negative_that_are_allowed():
    gradient = torch.tensor([[3.0, -1.0, -5.0, 0.0], [-1.0, -2.0, -9.0, 4.0]])
    forbidden = torch.tensor([False, False, True, False])
    assert promising_tokens(gradient, 2, forbidden).tolist() == [[1, 3], [1, 0]]
    assert promising_tokens(gradient, 99, forbidden).shape == (2, 3)


def test_candidates_change_the_asked_number_of_places_to_promising_tokens_of_these_places():
    suffix = torch.arange(100, 106)
    tokens = torch.arange(12).view(6, 2)
    for replaced in (1, 3, 6):
        drawn = candidate_suffixes(suffix, tokens, 400, replaced, torch.Generator().manual_seed(0))
        differs = drawn != suffix
        assert (differs.sum(1) == replaced).all()
        for place in range(6):
            assert {*drawn[differs[:, place], place].tolist()} == {*tokens[place].tolist()}


def test_the_same_seed_draws_the_same_candidates():
    suffix, tokens = torch.arange(6), torch.arange(60).view(6, 10)
    first, again, other = (
        candidate_suffixes(suffix, tokens, 9, 1, torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    )
    assert first.equal(again) and not first.equal(other)
