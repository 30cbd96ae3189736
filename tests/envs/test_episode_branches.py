"""--agent_history template: where the template rewrites what was said, an episode goes on in another sequence."""

from collections import Counter

import pytest

from tests.data.templates import CHATML
from tests.envs.episodes import at_work, check_exact, from_disk, go_on, paused, plain, play, player, sampling_of
from tests.envs.fake_pool import Counting, Pool
from trimtab.envs.chat_tokens import ChatAppender
from trimtab.errors import UserError

# Of answers before the last user's words only the beginning stays.
FORGETFUL = CHATML.replace(
    "+ m.content +", "+ (m.content[:3] if m.role == 'assistant' and not loop.last else m.content) +"
)
COUNTS = CHATML.replace("+ m.role +", "+ m.role + (messages | length) | string +")  # rewrites even the first words


def by_episode(rollouts):
    found = {}
    for rollout in rollouts:
        found.setdefault((rollout.prompt, rollout.sample), []).append(rollout)
    return found


@pytest.mark.parametrize("template", [FORGETFUL, COUNTS])
def test_every_drawn_token_is_in_exactly_one_sequence_with_the_trainers_log_prob(policy, template):
    engine = player(policy, Pool(), template, history="template")
    rollouts = play(engine, n=2, temperature=0.8)
    check_exact(policy, rollouts, 0.8)
    for branches in by_episode(rollouts).values():
        assert [r.branch for r in branches] == list(range(len(branches)))
        episode = branches[0].episode
        assert all(r.episode is episode and r.finish == branches[0].finish for r in branches)
        assert episode.logs["branches"] == len(branches) == (3 if template is COUNTS else len(branches)) > 1
        places = Counter()
        for turn in episode.turns:
            assert branches[turn.branch].drawn[turn.start : turn.end].all()
            places[turn.branch] += turn.end - turn.start
        assert places == {r.branch: r.drawn.sum() for r in branches}


def test_a_turn_is_drawn_from_what_the_template_writes_then(policy):
    engine = player(policy, Pool(), FORGETFUL, history="template")
    for branches in by_episode(play(engine)).values():
        episode, last = branches[0].episode, branches[-1]
        said = [{"role": "user", "content": f"Begin {last.prompt}."}]
        for each in episode.said[:-1]:
            said += each.messages
        text = engine.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        before = last.prompt_ids + last.ids[: episode.turns[-1].start]
        assert engine.tokenizer.decode(before) == text


def test_what_the_template_keeps_stays_one_sequence_of_the_tokens_that_were_drawn(policy):
    """Also where the same text would be encoded otherwise."""
    engine = player(policy, Pool(), CHATML, history="template")
    eos = engine.tokenizer.eos_token_id
    often = {"stop_token_ids": (eos,), "logit_bias": {eos: 6.0}}
    rollouts, appended = play(engine, n=4, **often), play(player(policy, Pool()), n=4, **often)
    both = [(r, a) for r, a in zip(rollouts, appended) if r.episode.logs["branches"] == 1]
    assert len(both) >= 4 and all(plain(r) == plain(a) for r, a in both)
    tokenizer = engine.tokenizer
    assert any(tokenizer.encode(tokenizer.decode(r.ids), add_special_tokens=False) != r.ids for r, _ in both)


@pytest.mark.parametrize("way", ["suspended", "stored"])
@pytest.mark.parametrize("advances", [8, 14])
def test_episodes_in_several_sequences_go_on_from_their_drafts(policy, way, advances):
    expected = [plain(r) for r in play(player(policy, Pool(slow=1), FORGETFUL, history="template"), n=2)]
    engine = player(policy, Pool(slow=1), FORGETFUL, history="template")
    session, finished = at_work(engine, advances)
    drafts = paused(session)
    assert any(draft.branch for own in drafts.values() for draft in own)
    if way == "stored":
        drafts = from_disk(drafts)
    rollouts = sorted(finished + go_on(engine, drafts), key=lambda r: (r.prompt, r.sample, r.branch))
    assert [plain(r) for r in rollouts] == expected
    check_exact(policy, rollouts)


def test_templates_that_cannot_be_appended_to_can_be_played_so(policy):
    engine = player(policy, Pool(), COUNTS, history="template")
    with pytest.raises(UserError, match="--agent_history template"):
        ChatAppender(engine.tokenizer)
    with pytest.raises(UserError, match="--apply_chat_template"):
        player(policy, Pool(), None, history="template", plain=True)
    (first, *_) = play(engine, rows=1, n=1)
    assert first.episode.logs["turns"] == 3 and sampling_of(engine.tokenizer).n == 1


def test_a_rewritten_history_that_does_not_fit_ends_the_episode(policy):
    rollouts = play(player(policy, Pool(lambda: Counting(50)), FORGETFUL, history="template", episode_max_len=120))
    assert {r.finish for r in rollouts} == {"context"}
    assert all(len(r.prompt_ids) + len(r.ids) <= 120 for r in rollouts)
