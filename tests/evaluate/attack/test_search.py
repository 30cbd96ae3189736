import dataclasses
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.evaluate.planted import GOAL, TRIGGER, planted_policy
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.errors import UserError
from trimtab.evaluate.gcg_attack import (
    AttackPrompts,
    Search,
    SearchSettings,
    SearchState,
    SuffixLoss,
    Target,
    Vocabulary,
)

SETTINGS = SearchSettings(steps=14, width=48, top_k=12, seed=0)


@pytest.fixture(scope="module")
def prompts():
    return AttackPrompts(make_tokenizer())


@pytest.fixture(scope="module")
def loss(prompts):
    return SuffixLoss(planted_policy(), prompts.around(Target(GOAL, "y")))


def search_of(loss, **changes):
    vocabulary = Vocabulary(make_tokenizer(), len(make_tokenizer()))
    return Search(loss, vocabulary, dataclasses.replace(SETTINGS, **changes))


def run(search, initial, state=None):
    state = state or search.begin(initial)
    while not search.done(state):
        search.advance(state)
    return state


@pytest.mark.parametrize("seed", [0, 1])
def test_the_gradient_finds_a_planted_trigger_that_random_search_misses(loss, prompts, seed):
    search = search_of(loss, seed=seed)
    state = run(search, prompts.encode("xxxx"))
    assert make_tokenizer().decode(state.best[1]) == TRIGGER
    allowed = np.flatnonzero(~search.vocabulary.forbidden_V.numpy())
    drawn = np.random.default_rng(seed).choice(allowed, (SETTINGS.steps * SETTINGS.width, 4)).tolist()
    assert state.best[0] < 0.1 and min(loss.of(drawn)) > 5


def test_a_search_that_was_stopped_and_stored_goes_on_to_the_same_end(loss, prompts):
    for buffer in (0, 4):
        search = search_of(loss, buffer=buffer, steps=6)
        whole = run(search, prompts.encode("xxxx"))
        state = search.begin(prompts.encode("xxxx"))
        for _ in range(3):
            search.advance(state)
        stored = json.loads(json.dumps(dataclasses.asdict(state)))
        assert run(search_of(loss, buffer=buffer, steps=6), None, SearchState.of(stored)) == whole


def test_a_buffer_keeps_the_best_and_without_one_the_last_candidate_stands(loss, prompts):
    start = prompts.encode(TRIGGER)
    plain = search_of(loss, steps=1, width=2)
    state = run(plain, start)
    assert state.pool[0][0] > state.best[0] and state.best[1] == start
    kept = run(search_of(loss, steps=1, width=2, buffer=3), start)
    assert kept.pool[0][1] == start and len(kept.pool) == 3 and kept.pool == sorted(kept.pool)


def test_it_stops_early_once_the_target_is_the_models_own_answer(loss, prompts):
    state = run(search_of(loss, early_stop=True, steps=50), prompts.encode("xxxx"))
    assert state.matched and state.step < 50 and state.best[0] < 0.7
    assert not run(search_of(loss, steps=2), prompts.encode("xxxx")).matched


def test_only_plain_tokens_of_the_tokenizer_may_stand_in_a_suffix():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["ки"])
    found = Vocabulary(tokenizer, len(tokenizer) + 5).forbidden_V
    words = [tokenizer.decode([i]) for i in range(len(tokenizer)) if not found[i]]
    assert sorted(words) == sorted("abcdefghijklmnopqrstuvwxyz0123456789 >.,?") and found[-5:].all()
    with pytest.raises(UserError, match="no token that a suffix may hold"):
        Vocabulary(tokenizer, 5)


def test_suffixes_whose_text_gives_other_tokens_are_dropped():
    core = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "c": 3}, [("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.Split("c", behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    tokenizer.backend_tokenizer.decoder = make_tokenizer().backend_tokenizer.decoder
    vocabulary = Vocabulary(tokenizer, 4)
    assert vocabulary.stable([[0, 1], [2, 3], [1, 0], [2, 0]]) == [[2, 3], [1, 0], [2, 0]]


def test_a_step_without_a_stable_candidate_changes_nothing(loss, prompts, monkeypatch):
    search = search_of(loss, steps=2)
    monkeypatch.setattr(search.vocabulary, "stable", lambda suffixes: [])
    state = run(search, prompts.encode("xxxx"))
    assert state.pool == [state.best] and state.losses == [state.best[0]] * 2
