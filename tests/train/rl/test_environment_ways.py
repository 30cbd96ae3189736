"""RL on an environment in the ways a run can be laid out: several processes, layers or rows that are split, histories
that the template rewrites, a program that plays at an endpoint. What is drawn is what is trained in all of them."""

import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import warm
from tests.train.rl.async_run import tell_while_collecting
from tests.train.rl.environment_run import (
    AHEAD,
    BATCH,
    PROMPTS,
    SAMPLES,
    arguments,
    check_ledger,
    kept,
    write_game,
    write_task,
)
from tests.train.rl.rl_run import at, rows, weights
from trimtab.cli.main import main
from trimtab.embedded.sort_task import CHAT_TEMPLATE
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.train.rl.experience import Experience

EXACT = 1e-5

# The same game, played by a program that wants an endpoint.
AGENT = """
import httpx
from trimtab.embedded.guess_game import Guess
from trimtab.envs.types import Turn

async def run(task, *, base_url, api_key, model):
    game, messages, reward = Guess(), [], 0.0
    said = game.reset(task)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=60) as client:
        for number in range(3):
            messages.append({"role": "user", "content": said})
            reply = await client.post(f"{base_url}/chat/completions", json={"model": model, "messages": messages})
            reply.raise_for_status()
            answer = reply.json()["choices"][0]["message"]
            messages.append(answer)
            step = game.step(Turn(answer["content"], answer, [], "stop", number, 9))
            reward, said = reward + step.reward, step.messages
            if step.done:
                break
    return {"reward": reward, "guesses": number + 1}
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    path = tmp_path_factory.mktemp("agent") / "agent.py"
    path.write_text(AGENT)
    return path


def trained(out: Path) -> list[dict]:
    return [row for row in rows(out) if row["step"]]


def check_exact(out: Path, samples: int = PROMPTS * SAMPLES) -> list[dict]:
    """All were trained, from the log-probs that they were drawn with."""
    found = trained(out)
    assert sum(row["samples"] for row in found) == samples
    for row in found:
        assert row["log_prob_gap"] < EXACT and abs(row["log_prob_ratio"] - 1) < EXACT
        assert row["failed_episodes"] == row["begun_anew"] == 0 and row["grad_norm"] >= 0
    return found


# ---- several processes

SPLITS = [
    ("--ds_tensor_parallel_size 2", 2),
    ("", 2),
    ("--zero_stage 3", 2),
    ("--ring_attn_size 2", 2),
    ("--ds_tensor_parallel_size 2 --zero_stage 3", 4),
    ("--controller_apart", 3),
]


@pytest.mark.short(1)
@pytest.mark.parametrize("split, processes", SPLITS)
def test_processes_play_and_learn_what_one_does(games, played, tmp_path, split, processes):
    words = arguments(games, tmp_path / "out", games / "game.py", split)
    warm.world_outputs(words, processes)
    check_exact(tmp_path / "out")
    for row, other in zip(trained(played), trained(tmp_path / "out"), strict=True):
        for name in ("reward", "turns", "samples", "tokens"):
            assert other[name] == pytest.approx(row[name]), name
        for name in ("loss", "grad_norm", "sampled_entropy"):
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-5), name
    assert said(tmp_path / "out") == said(played)
    torch.testing.assert_close(weights(tmp_path / "out"), weights(played), atol=1e-4, rtol=0)


def said(out: Path) -> list[tuple]:
    return sorted((row["step"], row["row"], [turn["text"] for turn in row["turns"]]) for row in kept(out))


@pytest.mark.long
@pytest.mark.parametrize("split, processes", SPLITS[:3])
def test_processes_that_are_stopped_inside_episodes_lose_none(games, tmp_path, split, processes):
    game = write_game(tmp_path, slow=0.05)
    words = arguments(games, tmp_path / "out", game, AHEAD, split, "--num_episodes 2")
    stop = {0: partial(tell_while_collecting, signal.SIGTERM, 12)}
    codes = warm.run_world(words, processes, prepare=stop, log=tmp_path / "log")
    assert codes[0] == 128 + signal.SIGTERM, (tmp_path / "log.0").read_text()
    warm.world_outputs([*words, "--load_checkpoint"], processes)
    check_ledger(tmp_path / "out", 2 * PROMPTS)
    assert sum(row.get("begun_anew", 0) for row in rows(tmp_path / "out")) == 0


# ---- histories


def forgetful(games: Path) -> Path:
    """A model whose template leaves out what it has said before."""
    tokenizer = AutoTokenizer.from_pretrained(games / "model")
    start, end = "{% generation %}", "{% endgeneration %}"
    assert CHAT_TEMPLATE.count(start) == CHAT_TEMPLATE.count(end) == 1
    tokenizer.chat_template = CHAT_TEMPLATE.replace(start, start + "{% if loop.last %}").replace(
        end, "{% endif %}" + end
    )
    tokenizer.save_pretrained(games / "model")
    return games


@pytest.mark.long
@pytest.mark.parametrize("more", ["", "--async_train --async_staleness 2 --rollout_slots 6", "--turn_reward returns"])
def test_histories_that_the_template_rewrites_are_trained_in_several_sequences(tmp_path, more):
    games = forgetful(write_task(tmp_path / "task"))
    game = write_game(tmp_path)
    words = arguments(games, tmp_path / "out", game, more)
    assert main(words) == 2, "what cannot be appended to is refused"
    assert main([*words, "--agent_history", "template"]) == 0
    if "--async_train" in more:
        check_ledger(tmp_path / "out")
        found = trained(tmp_path / "out")
    else:
        found = check_exact(tmp_path / "out")
    assert all(row["branches"] > 1 and row["branches"] == pytest.approx(row["turns"]) for row in found)


# ---- an agent


@pytest.mark.short(1)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_program_at_an_endpoint_is_trained_on_what_was_drawn_for_it(games, agent, tmp_path, processes):
    words = arguments(games, tmp_path / "out", agent)
    warm.world_outputs(words, processes)
    for row in check_exact(tmp_path / "out"):
        assert row["reward/environment/guesses"] == row["turns"] <= 3
        assert row["branches"] == 1 and 0 <= row["reward"] <= 1


@pytest.mark.long
def test_a_program_at_an_endpoint_is_refused_where_the_policy_is_cut_over_processes(games, agent, tmp_path):
    words = arguments(games, tmp_path / "out", agent, "--ds_tensor_parallel_size 2")
    said, _ = warm.world_outputs(words, 2, 2)
    assert "error: --agent_func_path" in said and said.rstrip().endswith("use --zero_stage 3")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=str)
def test_a_program_at_an_endpoint_plays_a_stopped_iteration_again(games, agent, tmp_path, number):
    words = arguments(games, tmp_path / "out", agent)
    code = 128 + number if number == signal.SIGTERM else -number
    warm.output(words, code, prepare=partial(at, (1, "update", 1), number))
    assert warm.run([*words, "--load_checkpoint"]) == 0
    check_exact(tmp_path / "out")


@pytest.mark.long
def test_a_program_at_an_endpoint_outlives_updates_and_is_run_anew_after_a_stop(games, agent, tmp_path):
    words = arguments(games, tmp_path / "out", agent, AHEAD, "--num_episodes 2")
    warm.output(words, 128 + signal.SIGTERM, prepare=partial(tell_while_collecting, signal.SIGTERM, 30))
    warm.output([*words, "--load_checkpoint"])
    check_ledger(tmp_path / "out", 2 * PROMPTS)


# ---- what outlives an update


def test_every_token_of_an_episode_has_the_log_prob_of_the_weights_that_drew_it(games, tmp_path, monkeypatch):
    """What was computed by earlier weights is not used by later ones: a record goes on, its keys and values do not."""
    versions, changed = {}, BuiltinEngine.weights_changed
    model = AutoModelForCausalLM.from_pretrained(games / "model")
    versions[0] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def weights_changed(engine, version):
        changed(engine, version)
        versions[version] = {name: tensor.clone() for name, tensor in engine.policy.model.state_dict().items()}

    monkeypatch.setattr(BuiltinEngine, "weights_changed", weights_changed)
    game, recording = write_game(tmp_path, slow=0.02), tmp_path / "recording"
    words = arguments(games, tmp_path / "out", game, AHEAD, f"--num_episodes 2 --record {recording}")
    assert main(words) == 0
    check_ledger(tmp_path / "out", 2 * PROMPTS)
    several = 0
    for path in sorted(recording.glob("*.safetensors")):
        experience = Experience.from_tensors(load_file(path))
        for sample in range(len(experience)):
            several += check_versions(experience, sample, versions, model)
    assert several > 0, "some were played by two policies"
    assert len(versions) > BATCH


def check_versions(experience: Experience, sample: int, versions: dict, model, near: float = EXACT) -> bool:
    """Every token against the weights of its version, in one pass; whether there are several versions."""
    prompt, response = experience.prompt(sample), experience.response(sample)
    tokens = experience.tokens_of([sample])
    own, log_probs = experience.versions_N[tokens], experience.sampled_N[tokens]
    drawn = experience.drawn(sample)
    for version in own.unique().tolist():
        model.load_state_dict(versions[version])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0][drawn]
        torch.testing.assert_close(log_probs[own == version], expected[own == version], atol=near, rtol=0)
    return len(own.unique()) > 1
