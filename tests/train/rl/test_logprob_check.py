"""When an engine's log-probs are too far from the trainer's."""

from types import SimpleNamespace

import pytest
import torch

from tests.train.rl.rl_run import arguments, rows, without, write_task
from trimtab.cli.main import main
from trimtab.config.jobs import GRPOOptions
from trimtab.errors import RunFailed
from trimtab.rollout.builtin.attention import CachedAttention
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.train.rl.trainer import PolicyTrainer
from trimtab.train.rl.weight_sync import LogProbCheck, SampleCheck


class Prompts:
    def __len__(self):
        return 2

    def ids(self, index):
        return [index]


class Engines:
    """Of each, by how much its log-probs differ from the trainer's."""

    def call(self, method, **settings):
        assert method == "probe"
        return [SimpleNamespace(sampled_N=torch.tensor(found), old_N=None) for found in self.differences]


class Trainer:
    def fill(self, answers, name, role, method):
        setattr(answers, name, torch.zeros_like(answers.sampled_N))


def probe_of(*, bf16: bool) -> tuple[LogProbCheck, Engines]:
    options = SimpleNamespace(bf16=bf16, generate_max_len=8, seed=1, temperature=1.0)
    engines = Engines()
    return LogProbCheck(options, SimpleNamespace(rollouts=engines, actor=None), Prompts(), Trainer()), engines


@pytest.mark.parametrize(
    "bf16, differences, told",
    [
        (True, [[0.02, 0.02], [2.0, 2.0]], r"both were loaded with .* by 2\.0e\+00 on average, and 1\.0e-01"),
        (False, [[0.0, 0.0, 0.002]], "at most"),
        (False, [[0.0, float("nan")]], "inf at most"),
    ],
    ids=["a limit of its own", "every token counts", "no number is no agreement"],
)
def test_the_start_has_a_limit(bf16, differences, told):
    probe, engines = probe_of(bf16=bf16)
    engines.differences = differences
    with pytest.raises(RunFailed, match=told):
        probe.measure_start()


def test_in_bf16_later_limits_come_from_the_start():
    probe, engines = probe_of(bf16=True)
    engines.differences = [[0.02, 0.02]]
    probe.measure_start()
    engines.differences = [[0.05, 0.05]]
    probe.check(1)
    engines.differences = [[0.07, 0.07]]
    with pytest.raises(RunFailed, match=r"after iteration 2 .* on average"):
        probe.check(2)


@pytest.mark.parametrize("bf16, worst", [(True, 0.03), (False, 0.0002)], ids=["mean", "largest"])
def test_the_worst_engine_is_the_one_that_is_judged_worst(bf16, worst):
    """One that is far off everywhere, beside one with a single token that is further."""
    probe, engines = probe_of(bf16=bf16)
    steady, single = ([0.03] * 4, [0.0, 0.0, 0.0, 0.05]) if bf16 else ([0.0001] * 4, [0.0, 0.0, 0.0, 0.0002])
    engines.differences = [steady, single]
    gap = probe.gap()
    assert (gap.mean if bf16 else gap.largest) == pytest.approx(worst)


@pytest.fixture
def wrong_from(monkeypatch):
    """An engine whose decoding attends wrongly from this version of the weights on, in a run of so many iterations."""

    def run(version, out, iterations, *more):
        decode, weights_changed, newest = CachedAttention._decode, BuiltinEngine.weights_changed, [0]

        def changed(self, version):
            newest[0] = version
            weights_changed(self, version)

        def wrong(self, current, query, *rest):
            return decode(self, current, query * (8 if newest[0] >= version else 1), *rest)

        monkeypatch.setattr(BuiltinEngine, "weights_changed", changed)
        monkeypatch.setattr(CachedAttention, "_decode", wrong)
        words = without(arguments(write_task(out), out / "run", "grpo", *more), "--eval_dataset")
        words = [word for word in words if word != "--keep_dropout"]
        return main([*words, "--max_steps", str(iterations)])

    return run


def test_in_fp32_a_wrong_engine_ends_the_run_before_the_first_update(wrong_from, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PolicyTrainer, "update", lambda *_, **__: pytest.fail("these answers are another policy's"))
    assert wrong_from(0, tmp_path, 1) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "failed" in line]
    assert "log-probs of" in line and "0.01 is the limit" in line and "use --rollout_engine vllm" in line


def test_in_fp32_an_engine_that_becomes_wrong_ends_the_run_too(wrong_from, tmp_path, capsys):
    assert wrong_from(1, tmp_path, 3) == 1
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    assert "the tokens of iteration 2 differ" in capsys.readouterr().err


def test_in_bf16_a_wrong_engine_raises_an_alarm(wrong_from, tmp_path):
    assert wrong_from(0, tmp_path, 1, "--bf16") == 0
    assert any("drift apart" in alarm for alarm in rows(tmp_path / "run")[0]["alarms"])


@pytest.mark.parametrize("bf16, gap, told", [(True, 1e-7, 1), (True, 0.0, 0), (False, 1e-7, 0)])
def test_a_gap_is_an_alarm_where_log_probs_should_be_equal_bit_for_bit(bf16, gap, told):
    options = GRPOOptions(bf16=bf16, rollout_batch_size=32, n_samples_per_prompt=4, train_batch_size=128)
    row = {"step": 1, "log_prob_gap": gap, "alarms": ["another"]}
    SampleCheck(options, None, engine_exact=True).add_alarm(row)
    assert options.updates_per_iteration == 1 and len(row["alarms"]) == 1 + told
    assert all("bit for bit" in alarm for alarm in row["alarms"][1:])


def test_a_gap_after_other_updates_of_the_iteration_is_expected():
    options = GRPOOptions(bf16=True, rollout_batch_size=64, n_samples_per_prompt=4, train_batch_size=128)
    row = {"step": 1, "log_prob_gap": 1e-3}
    SampleCheck(options, None, engine_exact=True).add_alarm(row)
    assert options.updates_per_iteration > 1 and "alarms" not in row
