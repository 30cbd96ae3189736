"""Episodes drawn by an engine: the rules of tokens, limits, failures, and that company changes nothing."""

import numpy as np
import pytest
import torch

from tests.data.templates import CHATML, GEMMA, LLAMA3, QWEN3
from tests.envs.episodes import (
    CONTEXT,
    VOCABULARY,
    at_work,
    check_exact,
    make_policy,
    plain,
    play,
    player,
    sampling_of,
    trained,
)
from tests.envs.fake_pool import Counting, Fault, Pool, failing, stepping
from tests.envs.test_chat_tokens import REFUSED, templates
from trimtab.envs.environment_pool import StepReply
from trimtab.envs.types import Step
from trimtab.rollout.engine import Engine, Session


def pieces(tokenizer, rollout):
    """What was drawn and what was not, as texts in turn."""
    edges = np.flatnonzero(np.diff(rollout.drawn.astype(int))) + 1
    return [tokenizer.decode(part.tolist()) for part in np.split(rollout.tokens, edges)]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, QWEN3, None])
def test_log_probs_of_all_turns_are_the_trainers_in_one_pass(policy, template):
    engine = player(policy, Pool(), template, plain=template is None)
    rollouts = play(engine, n=3, temperature=0.8)
    assert [(r.prompt, r.sample) for r in rollouts] == [(p, s) for p in range(2) for s in range(3)]
    check_exact(policy, rollouts, 0.8)
    assert {len(r.episode.turns) for r in rollouts} == {3}
    assert {said.finish for r in rollouts for said in r.episode.turns} == {"stop", "length"}


@pytest.mark.long
def test_so_they_are_with_every_template_at_hand():
    policy = make_policy(context=8192)
    for path in templates():
        if path.stem.removesuffix("_training") in REFUSED:
            continue
        engine = player(policy, Pool(), path.read_text())
        assert len(engine.tokenizer) <= VOCABULARY
        rollouts = play(engine, n=1)
        assert {len(r.episode.turns) for r in rollouts} == {3}, path.name
        check_exact(policy, rollouts)


def test_what_is_drawn_is_marked_and_everything_else_is_the_templates(policy):
    engine = player(policy, Pool())
    for rollout in play(engine, n=2):
        assert engine.tokenizer.decode(rollout.prompt_ids) == (
            f"<|im_start|>user\nBegin {rollout.prompt}.<|im_end|>\n<|im_start|>assistant\n"
        )
        turns, said = rollout.episode.turns, [s for s in rollout.episode.said if not s.drawn]
        for turn, answer in zip(turns, said):
            ids = rollout.ids[turn.start : turn.end]
            assert rollout.drawn[turn.start : turn.end].all()
            end = "" if turn.finish == "stop" else "<|im_end|>"
            text = f"{end}\n<|im_start|>user\n{answer.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
            assert engine.tokenizer.decode(rollout.ids[answer.start : answer.end]) == text
            assert answer.start == turn.end and not rollout.drawn[answer.start : answer.end].any()
            assert f"had {len(ids)} tokens" in answer.messages[0]["content"]
        assert rollout.drawn.sum() == sum(turn.end - turn.start for turn in turns)
        assert turns[-1].end == len(rollout.ids) and rollout.episode.said[0].start == 0


def test_a_turn_is_drawn_from_exactly_the_tokens_before_it(policy):
    """The engine alone, asked for each turn by itself with the turn's own seed, draws the same."""
    from trimtab.rollout.sampling import request_seed

    engine = player(policy, Pool())
    sampling = sampling_of(engine.tokenizer)
    for rollout in play(engine, n=2):
        for number, turn in enumerate(rollout.episode.turns):
            seed = request_seed(request_seed(31 + rollout.prompt, rollout.sample), number)
            before = rollout.prompt_ids + rollout.ids[: turn.start]
            (alone,) = engine.engine.generate([before], sampling, seeds=[seed])
            assert alone.ids == rollout.ids[turn.start : turn.end]


def test_tokens_of_the_world_carry_no_gradient(policy):
    """Their logits have none: only what predicts a drawn token is trained."""
    (rollout, *_) = play(player(policy, Pool()), rows=1)
    own_of_trainer = trained(policy, rollout)
    assert len(own_of_trainer) == rollout.drawn.sum() < len(rollout.ids)
    ids = torch.tensor([rollout.prompt_ids + rollout.ids])
    logits = policy.model(ids).logits
    logits.retain_grad()
    places = np.flatnonzero(np.append(np.zeros(len(rollout.prompt_ids), dtype=bool), rollout.drawn))
    own = logits[0, places - 1].log_softmax(-1)[torch.arange(len(places)), ids[0, places]]
    torch.testing.assert_close(own, own_of_trainer, atol=1e-5, rtol=0)
    own.sum().backward()
    touched = logits.grad[0].abs().sum(-1) > 0
    expected = np.zeros(ids.shape[1], dtype=bool)
    expected[places - 1] = True
    assert touched.tolist() == expected.tolist()


def test_company_slowness_and_memory_change_nothing(policy):
    together = [plain(r) for r in play(player(policy, Pool()), rows=3, n=2)]
    assert len({str(one) for one in together}) == 6
    assert [plain(r) for r in play(player(policy, Pool()), rows=[2], n=2)] == together[4:]
    tight = {"kv_tokens": 640, "max_num_seqs": 2, "page_size": 8}
    assert [plain(r) for r in play(player(policy, Pool(slow=3), inner=tight), rows=3, n=2)] == together


def test_rewards_figures_and_logs_are_in_the_record(policy):
    (rollout,) = play(player(policy, Pool(lambda: Counting(last=10.0))), rows=1)
    episode = rollout.episode
    assert [turn.reward for turn in episode.turns] == [1.0, 2.0, 3.0]
    assert episode.last_reward == 10.0 and episode.reward == 16.0 and episode.begun == 1
    assert rollout.finish in ("stop", "length") and rollout.finish == episode.turns[-1].finish
    assert episode.logs == {
        **{"heard": 3.0, "ended": 1.0, "turns": 3.0, "branches": 1.0, "tool_calls": 0.0, "tool_failures": 0.0},
        **{"unknown_tools": 0.0, "seconds_environment": 0.25 + 3 * 0.5 + 0.125},
        "episode_length": float(len(rollout.prompt_ids) + len(rollout.ids)),
    }


# ---- limits


def test_max_turns_ends_an_episode_after_the_last_turn_was_rewarded(policy):
    (rollout,) = play(player(policy, Pool(lambda: Counting(9)), max_turns=2), rows=1)
    assert rollout.finish == "turns" and [turn.reward for turn in rollout.episode.turns] == [1.0, 2.0]
    assert rollout.episode.said[-1].drawn


def test_what_the_environment_cuts_off_is_truncated(policy):
    cutting = stepping(lambda self, turn: Step(reward=0.5, truncated=turn.number == 1))
    (rollout,) = play(player(policy, Pool(cutting)), rows=1)
    assert rollout.finish == "truncated" and rollout.episode.reward == 1.0


@pytest.mark.parametrize("longest", [60, 100, 140])
def test_an_observation_that_does_not_fit_is_not_read(policy, longest):
    rollouts = play(player(policy, Pool(lambda: Counting(99)), episode_max_len=longest), n=4)
    assert {r.finish for r in rollouts} == {"context"}
    for rollout in rollouts:
        assert len(rollout.prompt_ids) + len(rollout.ids) <= longest
        assert rollout.episode.said[-1].drawn and rollout.episode.turns[-1].reward > 0
    check_exact(policy, rollouts)


def test_the_models_context_is_a_limit_of_its_own(policy):
    flood = stepping(lambda self, turn: Step(messages="flood " * 20_000, reward=1.0))
    (rollout,) = play(player(policy, Pool(flood)), rows=1)
    assert rollout.finish == "context" and len(rollout.episode.said) == 1 and rollout.episode.reward == 1.0
    assert len(rollout.prompt_ids) + len(rollout.ids) <= CONTEXT


def test_a_prompt_that_leaves_no_room_ends_at_once(policy):
    (rollout,) = play(player(policy, Pool(), episode_max_len=5), rows=1)
    assert rollout.finish == "context" and rollout.ids == [] and rollout.episode.said == []


def test_the_middle_of_a_long_observation_is_cut_out_with_a_mark(policy):
    text = "first " + "noise " * 500 + "last"
    long = stepping(lambda self, turn: Step(messages=text, done=turn.number == 1))
    engine = player(policy, Pool(long), observation_max_len=60)
    (rollout,) = play(engine, rows=1)
    content = rollout.episode.said[1].messages[0]["content"]
    assert content.startswith("first") and content.endswith("last") and "tokens are left out here" in content
    assert len(engine.tokenizer.encode(content)) <= 62  # what is cut apart may be encoded otherwise
    assert rollout.finish in ("stop", "length")


def test_the_environment_may_ask_for_shorter_turns_and_stop_strings(policy):
    def step(self, turn):
        asked = {"max_new_tokens": 2} if turn.number == 0 else {"stop_strings": [" ", "e", "a", "t"]}
        return Step(sampling=asked, done=turn.number == 2)

    engine = player(policy, Pool(stepping(step)))
    for rollout in play(engine, n=4, stop_token_ids=(engine.tokenizer.eos_token_id,), max_new_tokens=20):
        _, second, third = rollout.episode.turns
        assert second.end - second.start <= 2
        assert third.finish == "length" or any(stop in third.text[-8:] for stop in " eat")
        check_exact(policy, [rollout])


def test_exact_tokens_of_an_environment_are_read_as_they_are(policy):
    exact = stepping(lambda self, turn: Step(ids=[9, 8, 7], done=turn.number == 1))
    (rollout,) = play(player(policy, Pool(exact)), rows=1)
    assert rollout.tokens[~rollout.drawn].tolist() == [9, 8, 7]


# ---- failures


def test_a_failing_environment_is_begun_anew_and_draws_the_same(policy):
    fault = failing(2, lambda what, instance, _: what == "step" and len(instance.heard) == 1)
    (rollout,) = play(player(policy, Pool(fault=fault)), rows=1)
    (expected,) = play(player(policy, Pool()), rows=1)
    assert plain(rollout) == plain(expected)
    assert rollout.episode.begun == 3 and expected.episode.begun == 1


def test_when_retries_are_used_up_the_whole_group_has_failed_and_nothing_is_scored(policy):
    def always(what, instance):
        if what == "step" and instance.task.row == 0 and instance.task.sample == 1 and instance.heard:
            raise Fault("the database is gone")

    pool = Pool(lambda: Counting(9), fault=always)
    rollouts = play(player(policy, pool, retries=1), n=3)
    assert [r.finish for r in rollouts if r.prompt == 0] == ["failed"] * 3
    assert all(r.ids == [] and len(r.log_probs) == 0 for r in rollouts if r.prompt == 0)
    assert [r.episode.problem for r in rollouts[:3]] == [None, "the database is gone", None]
    assert {r.finish for r in rollouts if r.prompt == 1} <= {"stop", "length"}
    assert not pool.instances


def test_words_that_the_template_refuses_are_the_environments_failure(policy):
    def step(self, turn):
        twice = [{"role": "user", "content": "I"}, {"role": "user", "content": "insist"}]
        return Step(messages=twice if self.task.row == 1 else "Go on", done=turn.number == 2)

    pool = Pool(stepping(step))
    first, second = play(player(policy, pool, GEMMA, retries=1))
    assert first.finish in ("stop", "length") and second.finish == "failed"
    assert "roles must alternate" in second.episode.problem and second.episode.begun == 2
    assert not pool.instances


def test_one_that_broke_for_anothers_sake_goes_on_where_it_was(policy):
    later = lambda what, instance, seen: what in ("step", "end") and len(instance.heard) == len(seen) + 1  # noqa: E731
    pool = Pool(fault=failing(3, later, "its process was ended", innocent=True))
    (rollout,) = play(player(policy, pool, retries=0), rows=1)
    (expected,) = play(player(policy, Pool()), rows=1)
    assert plain(rollout) == plain(expected)
    assert rollout.episode.begun == 1 and len(pool.made) == 4


def test_tools_of_a_turn_that_is_told_twice_count_once(policy):
    class Calling(Pool):
        def step(self, episode, turn):
            instance = self.instances[episode]
            self._reply("step", episode, lambda: StepReply(episode, instance.step(turn), 2, 1, 1, 0.5))

    pool = Calling(fault=failing(1, lambda what, *_: what == "end", "its process was ended", innocent=True))
    (rollout,) = play(player(policy, pool), rows=1)
    counts = [rollout.episode.logs[name] for name in ("tool_calls", "tool_failures", "unknown_tools")]
    assert len(pool.made) == 2 and counts == [6.0, 3.0, 3.0]


@pytest.mark.parametrize("ids", [[2**40], [-1], [10**6]])
def test_tokens_that_nobody_has_are_the_environments_failure(policy, ids):
    def step(self, turn):
        return Step(ids=ids if self.task.row == 1 else None, messages="Go on", done=turn.number == 1)

    first, second = play(player(policy, Pool(stepping(step)), retries=1))
    assert first.finish in ("stop", "length") and second.finish == "failed"
    assert "tokens that the tokenizer does not have" in second.episode.problem


# ---- the protocol


def test_it_is_an_engine_and_its_sessions_are_sessions(policy):
    engine = player(policy, Pool())
    assert isinstance(engine, Engine) and engine.exact and engine.context == CONTEXT
    with engine.session(sampling_of(engine.tokenizer)) as session:
        assert isinstance(session, Session) and not session.has_unfinished


def test_lengths_at_work_count_what_was_drawn_and_is_being_written_and_not_what_was_read(policy):
    engine = player(policy, Pool(slow=1))
    session, _ = at_work(engine, 8)
    lengths = session.output_lengths()
    drafts = {(row, draft.sample): draft for row, own in session.partials().items() for draft in own}
    assert lengths == {place: int(draft.drawn.sum()) for place, draft in drafts.items()} and min(lengths.values()) > 0
    assert any(len(draft.tokens) > lengths[place] for place, draft in drafts.items())
    assert session.output_ids(0) == session.partials()[0][0].ids
    session.close()
