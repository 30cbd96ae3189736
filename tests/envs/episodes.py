"""A tiny model that plays, and what its episodes must be."""

import numpy as np
import torch

from tests.data.templates import CHATML
from tests.envs.chat_templates import tokenizer_of
from tests.envs.fake_pool import Pool
from tests.tiny import tiny_model
from trimtab.data.batches import TokenBatch
from trimtab.envs.environment_engine import EnvironmentEngine
from trimtab.envs.types import EpisodeSettings, Task
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.episode import EpisodeRecord
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory

VOCABULARY, CONTEXT = 400, 512


def make_policy(context: int = CONTEXT) -> Policy:
    policy = Policy(tiny_model("llama", vocab_size=VOCABULARY, max_position_embeddings=context))
    choose_path(policy)
    return policy


def sampling_of(tokenizer, **changes) -> SamplingParams:
    """Every seventh token ends a turn, so that some are cut and some are not."""
    stops = tuple(sorted({tokenizer.eos_token_id, *range(60, VOCABULARY, 9)}))
    return SamplingParams(**{"max_new_tokens": 12, "stop_token_ids": stops, **changes})


def player(policy, pool: Pool, template: str | None = CHATML, inner: dict | None = None, **settings):
    tokenizer = tokenizer_of(template)
    engine = BuiltinEngine(policy, tokenizer, **(inner or {}))
    return EnvironmentEngine(engine, pool, tokenizer, EpisodeSettings(**settings))


def play(engine: EnvironmentEngine, rows: int | list[int] = 2, **sampling) -> list[Trajectory]:
    """These rows, or the first so many; what is given to each depends on its number alone."""
    rows = list(range(rows)) if isinstance(rows, int) else rows
    prompts, seeds = [[5, 6, 7 + row] for row in rows], [31 + row for row in rows]
    tasks = [Task(row, 0, seed=100 + row, prompt="Hello") for row in rows]
    return engine.generate(prompts, sampling_of(engine.tokenizer, **sampling), seeds=seeds, tasks=tasks)


def trained(policy: Policy, rollout: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    """The trainer's log-probs of what was drawn, all turns in one pass."""
    ids = np.array(rollout.prompt_ids + rollout.ids)
    drawn = np.append(np.zeros(len(rollout.prompt_ids), dtype=bool), rollout.drawn)
    return policy(TokenBatch.of([(ids, drawn)]), temperature=temperature).log_probs_N


def check_exact(policy: Policy, rollouts: list[Trajectory], temperature: float = 1.0) -> None:
    for rollout in rollouts:
        assert len(rollout.log_probs) == len(rollout.versions) == rollout.drawn.sum()
        own = trained(policy, rollout, temperature)
        torch.testing.assert_close(torch.from_numpy(rollout.log_probs), own, atol=1e-5, rtol=0)


def plain(rollout: Trajectory) -> tuple:
    """What must be equal where nothing but the company differs."""
    said = [(s.messages, s.start, s.end, s.drawn, s.text, s.finish, s.reward, s.branch) for s in rollout.episode.said]
    return rollout.prompt_ids, rollout.ids, rollout.drawn.tolist(), rollout.finish, rollout.episode.reward, said


def at_work(engine, advances, n=2):
    """A session with two rows, so many looks old."""
    session = engine.session(sampling_of(engine.tokenizer, n=n))
    for row in range(2):
        session.add([5, 6, 7 + row], seed=31 + row, task=Task(row, 0, 100 + row, "Hello"))
    finished = []
    for _ in range(advances):
        finished += session.step(3)
    return session, finished


def go_on(engine, drafts, n=2):
    """What they become in a new session; the row of each request is that of its number before."""
    with engine.session(sampling_of(engine.tokenizer, n=n)) as session:
        rows = {}
        for row, own in drafts.items():
            rows[session.add([5, 6, 7 + row], seed=31 + row, task=Task(row, 0, 100 + row, "Hello"), partials=own)] = row
        found = list(session)
    for rollout in found:
        rollout.prompt = rows[rollout.prompt]
    return found


def paused(session):
    """The drafts, by row, of a session that is aborted and closed."""
    session.abort()
    drafts = {}
    while session.has_unfinished:
        for rollout in session.step():
            assert rollout.finish == "abort"
            drafts.setdefault(rollout.prompt, []).append(rollout.stored())
    session.close()
    return drafts


def from_disk(drafts):
    return {row: [stored(draft) for draft in own] for row, own in drafts.items()}


def stored(draft):
    """As it comes from disk: nothing of it is the object that was."""
    episode = None if draft.episode is None else EpisodeRecord.of_plain(draft.episode.plain())
    own = (0, draft.sample, [], draft.tokens, draft.log_probs)
    return Trajectory(*own, versions=draft.versions, drawn=draft.drawn, episode=episode, branch=draft.branch)
