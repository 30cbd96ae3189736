"""--dry_run tries everything that a run would fail on, and shows what a run would do."""

import json
import re

import pytest

from tests.train.job_run import write_model, write_rows
from trimtab.cli.main import main
from trimtab.embedded.sort_task import make_prompts, make_rows
from trimtab.train import launch


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model")
    write_rows(folder / "train.jsonl", make_rows(300, seed=1))
    write_rows(folder / "prompts.jsonl", make_prompts(300, 1))
    return folder


@pytest.fixture
def dry(task, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(verb, *words):
        sft, rl = f"--dataset {task}/train.jsonl", f"--prompt_data {task}/prompts.jsonl --label_key label"
        data = sft if verb == "sft" else rl
        fixed = f"{verb} --dry_run --pretrain {task}/model --apply_chat_template {data}"
        return main([*fixed.split(), *words]), *capsys.readouterr()

    return run


GRPO = ("--rollout_batch_size", "30", "--train_batch_size", "240", "--micro_train_batch_size", "4")
GRPO += ("--generate_max_len", "20", "--prompt_max_len", "40")


def test_a_sample_is_shown_with_its_loss_mask_and_the_whole_runs_steps_and_memory_are_told(dry, task):
    code, told, _ = dry("sft", "--train_batch_size", "10", "--micro_train_batch_size", "5", "--max_epochs", "3")
    row = json.loads((task / "train.jsonl").read_text().splitlines()[0])["messages"]
    shown = f"# first sample, [[what is learnt]]: <user>{row[0]['content']}<assistant>[[{row[1]['content']}<eos>]]\n"
    assert code == 0 and shown in told
    assert launch.REHEARSED_ROWS < 300 and "# data: 300 rows give 90 steps\n" in told
    # What the process holds already counts too, and that is more where other tests ran in it before.
    assert re.search(r"# memory: about [0-9]\.\d\d GiB at the peak, of [\d.]+ GiB here: it fits\n", told)


def test_it_says_how_the_model_will_be_run(dry, tmp_path):
    verifier = ("--reward_verifier", "exact")
    code, told, _ = dry("grpo", *GRPO, *verifier)
    split = "# over several processes: --ds_tensor_parallel_size 2 or 4, --ring_attn_size\n"
    assert code == 0 and f"# rows: packed\n{split}# engine: built-in\n" in told
    write_model(tmp_path / "bloom", "bloom")
    bloom = ("--pretrain", str(tmp_path / "bloom"))
    code, told, _ = dry("sft", *bloom)
    assert code == 0 and "# rows: padded, not packed: BloomAttention does not use" in told
    assert "# over several processes: no --ds_tensor_parallel_size, no --ring_attn_size\n" in told
    code, told, _ = dry("grpo", *GRPO, *verifier, *bloom)
    assert code == 0 and "# engine: built-in, slow: every token runs its whole sequence again" in told


def test_the_steps_are_those_of_the_limit(dry):
    _, told, _ = dry("sft", "--train_batch_size", "10", "--micro_train_batch_size", "5", "--max_steps", "7")
    assert "# data: 300 rows give 7 steps\n" in told
    _, told, _ = dry("grpo", *GRPO, "--reward_verifier", "exact")
    assert "# data: 300 prompts give 10 iterations of 1 updates\n" in told


def test_the_reward_is_tried(dry, task):
    code, told, _ = dry("grpo", *GRPO, "--reward_verifier", "exact")
    label = json.loads((task / "prompts.jsonl").read_text().splitlines()[0])["label"]
    assert code == 0 and f"# reward, tried on the first prompt: 1 for {label!r}, 0 for " in told
    assert "# first prompt, as the policy reads it: <user>sort " in told


@pytest.mark.parametrize(
    "code, words",
    [
        ("def reward_func(queries, prompts, labels)\n    return 1", "SyntaxError"),
        ("def reward_func(queries, prompts, labels):\n    return nonsense", "nonsense"),
        ("def reward_func(queries, prompts, labels):\n    return [1.0]", "1 for 2 samples"),
    ],
)
def test_a_broken_reward_function_is_found(dry, tmp_path, code, words):
    (tmp_path / "reward.py").write_text(code)
    exit_code, _, told = dry("grpo", *GRPO, "--reward_func", str(tmp_path / "reward.py"))
    assert exit_code == 2 and words in told


def test_a_dead_server_and_a_missing_reward_model_are_found(dry):
    exit_code, _, told = dry("grpo", *GRPO, "--remote_rm_url", "http://127.0.0.1:9/get_reward")
    assert exit_code == 2 and "the reward was tried and failed: no reward" in told
    exit_code, _, told = dry("grpo", *GRPO, "--reward_pretrain", "./nowhere")
    assert exit_code == 2 and "./nowhere" in told
