"""Episodes drawn by a vLLM engine, as by any other."""

import pytest

from tests.data.templates import CHATML
from tests.envs.chat_templates import tokenizer_of
from tests.envs.episodes import CONTEXT, VOCABULARY, at_work, go_on, play, stored, trained
from tests.envs.fake_pool import Counting, Fault, Pool
from tests.vllm.conftest import engine_of, write_model
from trimtab.envs.environment_engine import EnvironmentEngine
from trimtab.envs.types import EpisodeSettings
from trimtab.models.selfcheck import choose_path

LIMIT = 1e-3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("model"), tokenizer_of(CHATML)
    policy = write_model(folder, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    choose_path(policy)
    engine = engine_of(folder, policy, tokenizer=tokenizer, max_num_seqs=64, longest=CONTEXT)
    yield engine, policy, tokenizer
    engine.close()


def check_near(policy, rollouts):
    for rollout in rollouts:
        own = trained(policy, rollout).detach().numpy()
        assert abs(own - rollout.log_probs).max() < LIMIT


def test_log_probs_of_all_turns_are_near_the_trainers_and_company_changes_nothing(made):
    inner, policy, tokenizer = made
    engine = EnvironmentEngine(inner, Pool(slow=2), tokenizer)
    together = play(engine, rows=3, n=2)
    assert {len(r.episode.turns) for r in together} == {3} and not engine.exact and engine.context == CONTEXT
    check_near(policy, together)
    alone = play(EnvironmentEngine(inner, Pool(), tokenizer), rows=[2], n=2)
    assert [r.ids for r in alone] == [r.ids for r in together if r.prompt == 2]


def test_limits_and_failures_are_as_with_any_engine(made):
    inner, policy, tokenizer = made

    def always(what, instance):
        if what == "step" and instance.task.row == 1:
            raise Fault("boom")

    settings = EpisodeSettings(episode_max_len=120, retries=1)
    rollouts = play(EnvironmentEngine(inner, Pool(lambda: Counting(99), fault=always), tokenizer, settings), n=2)
    assert [r.finish for r in rollouts] == ["context", "context", "failed", "failed"]
    check_near(policy, rollouts[:2])


@pytest.mark.parametrize("way", ["parked", "stored"])
def test_episodes_go_on_from_drafts(made, way):
    inner, policy, tokenizer = made
    pool = Pool(slow=1)
    engine = EnvironmentEngine(inner, pool, tokenizer)
    session, finished = at_work(engine, 25)
    drafts = session.partials()
    session.abort()
    while session.has_unfinished:
        session.step()
    session.close()
    if way == "stored":
        drafts = {row: [stored(draft) for draft in own] for row, own in drafts.items()}
    assert any(draft.drawn is not None and not draft.drawn.all() for own in drafts.values() for draft in own)
    rollouts = finished + go_on(engine, drafts)
    assert {len(r.episode.turns) for r in rollouts} == {3} and len(rollouts) == 4
    assert all(r.episode.begun == 1 for r in rollouts)
    check_near(policy, rollouts)
    before = {(row, d.sample): d.ids for row, own in drafts.items() for d in own}
    for rollout in rollouts:
        known = before.get((rollout.prompt, rollout.sample), [])
        assert rollout.ids[: len(known)] == known
