"""`trimtab compare`: which pairs pass, which do not and why, and which cannot be compared. These runs are written by
hand; tests/cli/test_compare.py trains some."""

import json
import re
from dataclasses import fields

import pytest

from tests.report.pages import Checked, change_manifest, read_lines, write_metrics, write_rl_run, write_run
from trimtab.config.data_options import AgentTrainingOptions
from trimtab.config.placement_options import ClusterOptions
from trimtab.config.rl_options import AsyncOptions, EngineOptions
from trimtab.report.judgement import OF_THE_DEVICE
from trimtab.report.run_data import read_run
from trimtab.train.run_directory import WITHOUT_EFFECT

SETTINGS = {"learning_rate": 1e-4, "train_batch_size": 8, "max_epochs": 1}
RL_SETTINGS = {"actor_learning_rate": 1e-4, "record": None, "replay": None, "reward_verifier": "exact"}


def scale_rows(folder, **factors) -> None:
    """Multiply columns; a factor of three values is of the first step, the others, and added to all."""
    rows = read_lines(folder / "metrics.jsonl")
    for row in rows:
        for name, (first, rest, more) in factors.items():
            if name in row:
                row[name] = row[name] * (first if row["step"] == 1 else rest) + more
    write_metrics(folder, rows)


@pytest.fixture
def pair(tmp_path):
    """Two equal runs in two precisions."""
    for name, dtype in (("a", "float32"), ("b", "bfloat16")):
        write_run(tmp_path / name)
        made = {"initial_weights": "files-abc", "data_order": "order", "seed": 1, "dtype": dtype, "threads": 1}
        change_manifest(tmp_path / name, settings=SETTINGS, **made)
    return tmp_path / "a", tmp_path / "b"


@pytest.fixture
def rl_pair(tmp_path):
    for name in ("a", "b"):
        write_rl_run(tmp_path / name)
        change_manifest(tmp_path / name, settings=RL_SETTINGS, seed=1, data_order="order")
    return tmp_path / "a", tmp_path / "b"


@pytest.fixture
def compared(trimtab):
    """The exit code, and what is found."""

    def compare(*words) -> tuple[int, dict]:
        done = trimtab("compare", *words, "--json")
        return done.code, json.loads(done.out)

    return compare


@pytest.fixture
def refusal(trimtab):
    def refuse(*words) -> str:
        done = trimtab("compare", *words)
        assert done.out == ""
        return done.mistake

    return refuse


def test_equal_runs_in_two_precisions_agree(compared, pair):
    code, found = compared(*pair)
    assert code == 0 and found["passes"] and found["complaints"] == []
    assert found["figures"]["loss"]["weighted"] == 0
    assert found["allowed_differences"] == ["precision: float32 and bfloat16"]


@pytest.mark.parametrize("rest, code", [(1.019, 0), (0.981, 0), (1.023, 1), (0.977, 1)])
def test_two_percent_is_the_limit(trimtab, pair, rest, code):
    scale_rows(pair[1], loss=(1, rest, 0))
    done = trimtab("compare", *pair)
    assert done.code == code
    told = done.out
    assert ("A and B agree" in told) == (code == 0)
    assert ("loss is 2." in told and "apart, more than 2 %" in told.replace("\u00a0", " ")) == (code == 1)


def test_the_limit_is_what_is_asked_for(compared, pair):
    scale_rows(pair[1], loss=(1, 1.05, 0))
    assert compared(*pair, "--tolerance", "0.06")[0] == 0
    assert compared(*pair, "--tolerance", "0.04")[0] == 1


def test_a_first_step_apart_fails_though_the_mean_is_within(compared, pair):
    scale_rows(pair[1], loss=(1.002, 1, 0))
    code, found = compared(*pair)
    assert code == 1 and found["figures"]["loss"]["weighted"] < 0.001
    assert len(found["complaints"]) == 1 and "loss of the first step is 0.20" in found["complaints"][0]
    assert compared(*pair, "--first_tolerance", "0.003")[0] == 0


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"initial_weights": "files-other"}, "they begin with different weights"),
        ({"data_order": "other"}, "they learn from different data, or from the same in another order"),
        ({"seed": 2}, "they have different seeds (1 and 2)"),
        ({"trainable": "other"}, "they train different parameters"),
        ({"steps": 41}, "they are planned for different numbers of steps"),
        ({"settings": SETTINGS | {"learning_rate": 1.1e-4}}, "--learning_rate is 0.0001 and 0.00011"),
        ({"settings": SETTINGS | {"label_smoothing": 0.1}}, "--label_smoothing is not an option and 0.1"),
        ({"settings": SETTINGS | {"l2": 0.1}}, "--l2 is 0 and 0.1"),
    ],
)
def test_another_training_fails_by_name_and_its_error_is_told(compared, pair, changes, told):
    change_manifest(pair[1], **changes)
    scale_rows(pair[1], loss=(1, 1.001, 0))
    code, found = compared(*pair)
    assert code == 1 and len(found["complaints"]) == 1 and found["complaints"][0].startswith(told)
    assert found["disagreements"] == found["complaints"]
    assert found["figures"]["loss"]["weighted"] == pytest.approx(0.001, rel=0.1)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"device": "NVIDIA H200"}, "device: CPU, 1 threads and NVIDIA H200"),
        ({"device_type": "npu"}, "kind of device: not said and npu"),
        ({"threads": 4}, "threads: 1 and 4"),
        ({"attention_path": "padded"}, "attention: not said and padded"),
        ({"fused_optimiser": False}, "fused optimiser: not said and no"),
        ({"versions": {"torch": "2.11"}}, "torch: not installed and 2.11"),
        ({"settings": SETTINGS | {"attn_implementation": "eager"}}, "--attn_implementation is – and eager"),
        ({"settings": SETTINGS | {"l2": 0.0}}, None),  # an option that an earlier version did not know, at its default
        ({"model": "elsewhere/model"}, None),
    ],
)
def test_what_belongs_to_a_device_may_differ_and_is_told(compared, pair, changes, told):
    change_manifest(pair[1], **changes)
    code, found = compared(*pair)
    assert code == 0
    assert found["allowed_differences"][1:] == ([told] if told else [])


# ---- RL


def test_rl_is_judged_by_reward_length_and_kl(compared, rl_pair):
    code, found = compared(*rl_pair)
    assert code == 0 and list(found["figures"]) == ["reward", "length", "kl"] and not found["same_answers"]
    scale_rows(rl_pair[1], reward=(1, 1.05, 0))
    code, found = compared(*rl_pair)
    assert code == 1 and found["complaints"][0].startswith("reward is ")


def test_the_kl_has_a_floor(compared, rl_pair):
    """Its first value is near 0, where any difference would be a large share."""
    scale_rows(rl_pair[1], kl=(1, 1, 0.0008))
    assert compared(*rl_pair)[0] == 0
    scale_rows(rl_pair[1], kl=(1, 1, 0.0008))
    code, found = compared(*rl_pair)
    assert code == 1 and found["figures"]["kl"]["weighted"] == pytest.approx(0.0016 / 0.05)


@pytest.mark.parametrize(
    "control, columns, told",
    [
        ("another order", {"reward": (1, 1.1, 0), "length": (1.012, 1.039, 0)}, ["reward is ", "answer length is "]),
        ("another model", {"reward": (1.26, 1.14, 0)}, ["reward is "]),
        ("other prompts, first seen in the length", {"length": (1.03, 1, 0)}, ["answer length of the first step"]),
        ("learning rate 10 % higher", {"reward": (1, 1.011, 0), "kl": (1, 1, 0.00035)}, []),
    ],
)
def test_what_the_figures_alone_catch(compared, rl_pair, control, columns, told):
    """The manifests agree here: as far apart as docs/compare.md measured the controls, which the last one passes."""
    scale_rows(rl_pair[1], **columns)
    code, found = compared(*rl_pair)
    assert code == bool(told) and not found["disagreements"]
    assert len(found["complaints"]) == len(told)
    assert all(complaint.startswith(words) for complaint, words in zip(found["complaints"], told))


def test_the_error_without_the_floor_is_told_where_the_floor_decides(trimtab, rl_pair):
    scale_rows(rl_pair[1], kl=(1.05, 1.05, 0))
    told = trimtab("compare", *rl_pair).said.replace("\u00a0", " ")
    (line,) = [line for line in told.splitlines() if line.startswith("KL ")]
    assert "1.03 % (5 % without its floor)" in line
    assert told.count("without its floor") == 1, "no other figure has one"
    assert "without its floor" in (rl_pair[1] / "agreement.html").read_text()


def replay(folder, **columns) -> None:
    settings = json.loads((folder / "manifest.json").read_text())["settings"]
    change_manifest(folder, settings=settings | {"replay": "recording"})
    scale_rows(folder, **columns)


def with_log_probs(rl_pair) -> None:
    for folder in rl_pair:
        more = {"log_prob": -0.5, "advantage_size": 0.8}
        write_metrics(folder, [row | (more if row["step"] else {}) for row in read_lines(folder / "metrics.jsonl")])


def test_replayed_rl_is_judged_by_what_is_made_of_the_answers(compared, rl_pair):
    with_log_probs(rl_pair)
    replay(rl_pair[1])
    code, found = compared(*rl_pair)
    assert code == 0 and found["same_answers"]
    assert list(found["figures"]) == ["log_prob", "policy_loss", "kl", "grad_norm"]
    scale_rows(rl_pair[1], policy_loss=(1, 1, 0.015), log_prob=(1.006, 1, 0))
    code, found = compared(*rl_pair)
    assert found["figures"]["policy_loss"]["weighted"] == pytest.approx(0.015 / 0.8), "against the advantages' size"
    assert [told.split(" is ")[0] for told in found["complaints"]] == ["log-prob of the answers of the first step"]


@pytest.mark.parametrize(
    "changes, settings, judged",
    [
        ({}, {}, False),
        ({"threads": 4, "attention_path": "other"}, {}, False),
        ({"device_type": "cuda"}, {}, True),
        ({"dtype": "bfloat16"}, {}, True),
        ({}, {"weight_only_int8": True}, True),
        ({}, {"rollout_engine": "vllm"}, True),
    ],
)
def test_a_kl_that_is_the_recording_s_is_not_judged(compared, trimtab, rl_pair, changes, settings, judged):
    """A replay in fp32 on the same kind of device takes the recorded log-probs, of which the KL is made."""
    with_log_probs(rl_pair)
    replay(rl_pair[1], kl=(1, 1, 0.01))
    change_manifest(rl_pair[0], device_type="cpu")
    settings = RL_SETTINGS | {"replay": "recording"} | settings
    change_manifest(rl_pair[1], **{"device_type": "cpu", "settings": settings} | changes)
    code, found = compared(*rl_pair)
    assert code == judged and found["figures"]["kl"]["as_recorded"] != judged
    for told in (trimtab("compare", *rl_pair).out, (rl_pair[1] / "agreement.html").read_text()):
        assert ("KL, as recorded" in told) != judged


def test_both_runs_in_bf16_have_kl_of_their_own(compared, rl_pair):
    with_log_probs(rl_pair)
    replay(rl_pair[1], kl=(1, 1, 0.01))
    for folder in rl_pair:
        change_manifest(folder, dtype="bfloat16")
    code, found = compared(*rl_pair)
    assert code == 1 and not found["figures"]["kl"]["as_recorded"]


@pytest.mark.parametrize(
    "name, value, replayed, code",
    [
        ("agent_func_path", "turns.py", 0, 1),
        ("async_train", True, 0, 1),
        ("async_train", True, 1, 0),
        ("async_staleness", 4, 1, 0),
        ("async_timeout", 5.0, 0, 0),
        ("enable_vllm_is_correction", True, 0, 1),
        ("weight_only_int8", True, 0, 1),
        ("weight_only_int8", True, 1, 0),
        ("repetition_penalty", 1.2, 0, 1),
        ("repetition_penalty", 1.2, 1, 0),
        ("generate_min_len", 4, 1, 0),
        ("temperature", 0.5, 1, 1),  # of what is trained, too
        ("rollout_slots", 8, 0, 0),
        ("ref_num_gpus_per_node", 2, 0, 0),
    ],
)
def test_what_changes_answers_is_no_matter_of_the_device(compared, rl_pair, name, value, replayed, code):
    with_log_probs(rl_pair)
    settings = RL_SETTINGS | {name: value} | ({"replay": "recording"} if replayed else {})
    change_manifest(rl_pair[1], settings=settings)
    found = compared(*rl_pair)
    assert found[0] == code
    assert any(f"--{name} is" in told for told in found[1]["disagreements" if code else "allowed_differences"])


def test_every_option_of_placement_and_engines_is_of_the_device_or_named_here():
    """A new one has to be decided on."""
    known = {
        field.name
        for group in (ClusterOptions, EngineOptions, AsyncOptions, AgentTrainingOptions)
        for field in fields(group)
    }
    learnt = {"agent_func_path", "enable_vllm_is_correction", "vllm_is_truncated_threshold"}
    learnt |= {"environment", "env_rows", "max_turns", "episode_max_len", "observation_max_len", "agent_history"}
    learnt |= {"turn_reward", "mask_truncated"}
    learnt |= {"async_train", "async_queue_size", "async_staleness", "partial_rollout"}
    assert known - OF_THE_DEVICE - WITHOUT_EFFECT == learnt | {"weight_only_int8"}


def test_a_replay_needs_no_reward_to_agree(compared, rl_pair):
    with_log_probs(rl_pair)
    replay(rl_pair[1])
    settings = RL_SETTINGS | {"replay": "recording", "reward_verifier": None, "prompt_data": "elsewhere"}
    change_manifest(rl_pair[1], settings=settings, reward="none")
    code, found = compared(*rl_pair)
    assert code == 0 and "--reward_verifier is exact and –" in found["allowed_differences"]


def test_a_replay_of_other_answers_is_refused(refusal, rl_pair):
    with_log_probs(rl_pair)
    replay(rl_pair[1], sampled_entropy=(1, 1.01, 0))
    told = refusal(*rl_pair)
    assert "did not learn from the same answers (iteration 2: sampled_entropy" in told


def test_another_reward_is_another_training(compared, rl_pair):
    change_manifest(rl_pair[1], reward="the file other.py")
    code, found = compared(*rl_pair)
    assert code == 1 and found["complaints"] == ["their rewards are the file reward.py and the file other.py"]


def test_a_preset_and_the_same_by_its_options_are_one_job(compared, tmp_path):
    for name, job in (("a", "grpo"), ("b", "rl")):
        write_rl_run(tmp_path / name, job, advantage_estimator="group_norm")
    assert compared(tmp_path / "a", tmp_path / "b")[0] == 0


# ---- what cannot be compared


def test_runs_of_two_jobs_are_refused(refusal, tmp_path):
    for job in ("sft", "dpo"):
        write_run(tmp_path / job, job)
    for job in ("ppo", "grpo"):
        write_rl_run(tmp_path / job, job)
    for one, other in (("sft", "dpo"), ("sft", "grpo"), ("ppo", "grpo")):
        assert "give two runs of one job" in refusal(tmp_path / one, tmp_path / other)


def test_what_is_no_run_is_refused(refusal, pair, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no such folder" in refusal(pair[0], tmp_path / "nowhere")
    assert "no metrics.jsonl" in refusal(tmp_path / "empty", pair[1])
    assert "given twice" in refusal(pair[0], pair[0])
    assert "RUN_B" in refusal(pair[0])


def test_a_run_without_a_manifest_is_refused(refusal, pair):
    (pair[1] / "manifest.json").unlink()
    assert "no readable manifest.json" in refusal(*pair)


@pytest.mark.parametrize("name", ["data_order", "seed", "trainable", "steps"])
def test_what_both_manifests_lack_is_no_agreement(refusal, pair, name):
    for folder in pair:
        change_manifest(folder, **{name: None})
    told = refusal(*pair)
    assert f"does not say {name}" in told and "cannot be told" in told


@pytest.mark.parametrize("a, b", [("files-abc", "abc"), ("abc", "abd")])
def test_weights_that_cannot_be_told_apart_are_refused(refusal, pair, a, b):
    """Fingerprints of files and of memory, or of memory in two precisions."""
    for folder, weights in zip(pair, (a, b)):
        change_manifest(folder, initial_weights=weights)
    assert "cannot be told" in refusal(*pair)


def test_a_shorter_run_is_refused_and_its_steps_can_be_compared(compared, refusal, pair):
    lines = (pair[1] / "metrics.jsonl").read_text().splitlines()
    (pair[1] / "metrics.jsonl").write_text("\n".join(lines[:20]) + "\n")
    assert "it lacks step 21 to 40" in refusal(*pair)
    code, found = compared(*pair, "--steps", "20")
    assert code == 0 and found["figures"]["loss"]["steps"] == 20


@pytest.mark.parametrize("words", ["--tolerance 2", "--tolerance -0.1", "--first_tolerance nan", "--steps 0"])
def test_limits_that_make_no_sense_are_refused(refusal, pair, words):
    assert words.split()[0] in refusal(*pair, *words.split())


# ---- the page


def test_the_page_shows_both_curves_and_their_difference(trimtab, pair, tmp_path):
    scale_rows(pair[1], loss=(1, 1.001, 0))
    assert trimtab("compare", *pair).said.splitlines()[-1] == f"page: {pair[1]}/agreement.html"
    page = (pair[1] / "agreement.html").read_text()
    seen = Checked(page)
    assert "script" not in seen.tags and not any(name == "src" for name, _ in seen.attributes)
    assert "A and B agree" in page and "B less A" in page and "bfloat16" in page
    assert len(re.findall(r'<path class="only c[01]"', page)) == 2
    assert trimtab("compare", *pair, "--output", tmp_path / "there.html").code == 0
    assert (tmp_path / "there.html").is_file()


def test_the_page_names_what_is_wrong_and_escapes_it(trimtab, pair):
    change_manifest(pair[1], settings=SETTINGS | {"learning_rate": "<b>1</b>"})
    assert trimtab("compare", *pair).code == 1
    page = (pair[1] / "agreement.html").read_text()
    Checked(page)
    assert "<code>--learning_rate</code> is 0.0001 and &lt;b&gt;1&lt;/b&gt;" in page
    assert "A and B are not the same training" in page


def test_a_page_is_drawn_of_what_has_no_bound(trimtab, pair):
    rows = [{"step": step, "loss": 0.0} for step in range(1, 9)]
    write_metrics(pair[0], rows)
    write_metrics(pair[1], [row | {"loss": 0.5} for row in rows])
    assert trimtab("compare", *pair).code == 1
    assert "without bound" in (pair[1] / "agreement.html").read_text()
    assert read_run(pair[0]).steps == 8
