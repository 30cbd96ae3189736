"""A vLLM engine in the hands of a thread: answers are cut anywhere, read while they grow, and lose nothing."""

import numpy as np
import pytest

from tests.vllm.conftest import engine_of, write_model
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.rewards.requests import PromptBatch
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.rl.async_worker import ThreadedRolloutWorker
from trimtab.train.rl.rollout_worker import Admission, InFlightGroup

PROMPTS, SEEDS = [[5, 6, 7, 8], [9, 10, 11], [12]], [1, 2, 3]
GREEDY = SamplingParams(max_new_tokens=100, n=2, temperature=0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, tie_word_embeddings=True)
    engine = engine_of(folder, None, tokenizer=make_tokenizer(), max_num_seqs=4)
    yield engine
    engine.close()


@pytest.mark.parametrize("drained", [False, True], ids=["in_flight", "drained"])
def test_answers_of_a_thread_that_is_interrupted_again_and_again(drained, engine):
    expected = {(r.prompt, r.sample): r for r in engine.generate(PROMPTS, GREEDY, seeds=SEEDS)}
    role = ThreadedRolloutWorker(engine, [], make_tokenizer(), lambda: False)
    groups = [InFlightGroup(place, 0, place, SEEDS[place]) for place in range(3)]
    role.admit(Admission(groups, PromptBatch([0, 1, 2], SEEDS, PROMPTS, "prompt")), sampling=GREEDY)
    role.resume()
    found, seen, cut = {}, 0, 0
    while len(found) < 3:
        found |= {written.place: written.experience for written in role.collect(seconds=0.03).finished}
        for group in role.unfinished():  # while the thread writes
            for draft in group.trajectories:
                whole = expected[group.place, draft.sample]
                assert draft.ids == whole.ids[: len(draft.ids)] and len(draft.ids) == len(draft.log_probs)
                np.testing.assert_allclose(draft.log_probs, whole.log_probs[: len(draft.ids)], atol=1e-3)
                seen += 0 < len(draft.ids) < len(whole.ids)
        assert role.pause(drained=drained)
        cut += sum(draft.finish is None for group in role.unfinished() for draft in group.trajectories if draft.ids)
        role.resume()
    role._end()  # the engine is for both cases
    assert seen and (cut == 0) == drained
    for (place, sample), rollout in expected.items():
        assert found[place].response(sample) == rollout.ids
