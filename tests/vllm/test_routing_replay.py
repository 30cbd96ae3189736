"""Experts of a vLLM engine in scoring and updates.

vLLM 0.32 returns them with its second model runner, which needs Triton. On a CPU a stand-in records what the routers of
the first one choose, and gives it to the session in the shape, dtype and order of vLLM's.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.train.rl.rl_run import arguments, rows, write_task
from trimtab.models.policy import Policy
from trimtab.models.routing import recorded_routes
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.vllm.engine import VLLMEngine, VLLMSession
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.micro_batches import make_slice
from trimtab.train.rl.source import RolloutSource

MIXTURES = {
    "mixtral": {"hidden_size": 128, "spread": 0.1},
    # Of three layers, one is dense. vLLM on a CPU pads narrower experts, and then cannot reload them.
    "qwen3_moe": {"hidden_size": 128, "spread": 0.1, "head_dim": 32, "moe_intermediate_size": 32}
    | {"num_hidden_layers": 3, "mlp_only_layers": [1]},
}
SHORT = "--rollout_engine vllm --rollout_slots 16 --max_steps 2 --enable_prefix_caching --max_epochs 1 --eval_steps -1"


class RecordedRouters:
    """Rows of experts by the tokens up to theirs, since the prefix cache lets later requests skip them."""

    def __init__(self, engine):
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        self.runner = engine.llm.model_executor.driver_worker.worker.model_runner
        config = engine.llm.model_config
        self.shape = config.get_total_num_hidden_layers(), config.get_num_experts_per_tok()
        self.step, self.known = {}, {}
        bind_routed_experts_capturer(self.runner.model, self)
        self.plain, self.runner.execute_model = self.runner.execute_model, self.execute_model

    def capture(self, layer, chosen):
        self.step[layer] = chosen.clone()

    def execute_model(self, scheduled, *more, **named):
        out = self.plain(scheduled, *more, **named)
        batch, row = self.runner.input_batch, 0
        for place, name in enumerate(batch.req_ids):
            begin, count = int(batch.num_computed_tokens_cpu[place]), scheduled.num_scheduled_tokens[name]
            ids = tuple(batch.token_ids_cpu[place, : begin + count].tolist())
            for i in range(count):
                found = np.zeros(self.shape, np.uint8)
                for layer, chosen in self.step.items():
                    found[layer] = chosen[row + i]
                self.known[ids[: begin + i + 1]] = found
            row += count
        return out

    def of(self, ids):
        """Of all tokens but the last."""
        return np.stack([self.known[tuple(ids[: end + 1])] for end in range(len(ids) - 1)])


@pytest.fixture
def recorded_routers(monkeypatch):
    begin, take, change = VLLMEngine.__init__, VLLMSession._take, VLLMEngine._changed

    def begun(engine, *given):
        begin(engine, *given)
        engine.recorded = RecordedRouters(engine) if engine.settings.routed_layers else None

    def taken(session, name, sample, output):
        if output.finish_reason is not None and session.engine.recorded is not None:
            ids = sample.prompt_ids + sample.partial.ids + list(output.token_ids)
            output.routed_experts = session.engine.recorded.of(ids)
        return take(session, name, sample, output)

    def changed(engine, version):
        change(engine, version)
        if engine.recorded is not None:
            engine.recorded.known.clear()

    monkeypatch.setattr(VLLMEngine, "__init__", begun)
    monkeypatch.setattr(VLLMSession, "_take", taken)
    monkeypatch.setattr(VLLMEngine, "_changed", changed)


@pytest.fixture
def sampled(monkeypatch):
    """The experience of every iteration."""
    found, plain = [], RolloutSource.next

    def following(source, *given):
        batch = plain(source, *given)
        found.append(batch[0])
        return batch

    monkeypatch.setattr(RolloutSource, "next", following)
    return found


@pytest.mark.parametrize("how", ["", "--bf16"])
@pytest.mark.parametrize("family", MIXTURES)
def test_two_steps_with_the_engines_experts(family, how, tmp_path, in_command, recorded_routers, sampled, capsys):
    folder = write_task(tmp_path, family=family, **MIXTURES[family])
    gaps = {}
    for replay in ("auto", "off"):
        words = arguments(folder, tmp_path / replay, "grpo", SHORT, how, f"--routing_replay {replay}")
        assert in_command(words) == 0
        gaps[replay] = [row["log_prob_gap"] for row in rows(tmp_path / replay)[1:]]
    assert "vLLM does not return the experts it chooses here" in capsys.readouterr().out
    with_routes, without = sampled[:2], sampled[2:]
    same = agreement(folder / "model", with_routes[0], bf16=bool(how))
    with capsys.disabled():
        print(f"{family} {how}: log_prob_gap {gaps}, experts of vLLM that are the trainer's own: {same:.4f}")
    assert all(experience.routes_TLK is None for experience in without)
    for experience in with_routes:
        check_known(experience)
    assert max(gaps["auto"]) < (0.1 if how else 1e-4)
    assert same > (0.9 if how else 0.99)


def agreement(model: Path, experience: Experience, *, bf16: bool) -> float:
    """The share of tokens and layers for which the model of the folder chooses the same experts by itself."""
    policy = Policy(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if bf16 else torch.float32))
    choose_path(policy)
    same = []
    for i in range(len(experience)):
        (batch,) = make_slice(experience, [[i]], routes_TLK=experience.routes_TLK).batches()
        given_TLK, batch.routes_TLK = batch.routes_TLK, None
        with torch.no_grad(), recorded_routes(policy) as routes:
            policy(batch)
        own_TLK = torch.stack([chosen for (chosen,) in routes.values()], 1)
        known = given_TLK[:-1].long().sort(-1).values
        same.append((known == own_TLK[:-1].sort(-1).values).all(-1).float().flatten())
    return float(torch.cat(same).mean())


def check_known(experience: Experience):
    """All tokens but the last of a sequence have two different experts in each of two mixtures."""
    routes_TLK = experience.routes_TLK
    assert routes_TLK.dtype == torch.uint8 and routes_TLK.shape[1:] == (2, 2)
    known_T = (routes_TLK != 255).all(2).all(1)
    ends = (experience.offsets_S + experience.sequence_lengths_S - 1).tolist()
    assert (~known_T).nonzero()[:, 0].tolist() == ends
    assert bool((routes_TLK[known_T, :, 0] != routes_TLK[known_T, :, 1]).all())
    assert int(routes_TLK[known_T].max()) < 4


def test_what_vllm_does_not_return_is_one_line_if_it_was_asked_for(tmp_path, in_command, capsys):
    folder = write_task(tmp_path, family="mixtral", **MIXTURES["mixtral"])
    assert in_command(arguments(folder, tmp_path / "out", "grpo", SHORT, "--routing_replay on")) == 2
    assert "--routing_replay on: vLLM does not return the experts it chooses here" in capsys.readouterr().err
