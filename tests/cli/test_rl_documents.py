"""RL commands that people have in their scripts, scaled to one machine: each trains two iterations."""

import shlex

import pytest
import torch
from transformers import LlamaForSequenceClassification

from tests import warm
from tests.config.test_documented_commands import RL_COMMANDS
from tests.json_server import answering
from tests.tiny import tiny_model
from tests.train.job_run import write_rows
from trimtab.embedded.sort_task import make_prompts, make_tokenizer
from trimtab.train.metrics import read_rows

# One GPU for everything, short answers, few prompts. What comes last on a command line counts.
SCALED = """--colocate_all_models --actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1 --reward_num_gpus_per_node 1
    --critic_num_gpus_per_node 1 --vllm_num_engines 1 --vllm_tensor_parallel_size 1 --prompt_max_len 40
    --generate_max_len 8 --rollout_batch_size 4 --train_batch_size 16 --max_samples 8 --actor_learning_rate 1e-3"""
REWARD = "def reward_func(queries, prompts, labels):\n    return [0.1 + len(set(q)) % 3 / 4 for q in queries]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    tokenizer = make_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=4096)
    model.save_pretrained(folder / "policy")
    model.config.update({"num_labels": 1, "mean": 0.1, "std": 2.0})
    torch.manual_seed(1)
    LlamaForSequenceClassification(model.config).save_pretrained(folder / "judge")
    for name in ("policy", "judge"):
        tokenizer.save_pretrained(folder / name)
    rows = [{"context_messages": row["input"], "answer": row["label"]} for row in make_prompts(8, 1)]
    write_rows(folder / "prompts.jsonl", rows)
    (folder / "reward_func.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def judge():
    with answering(lambda body: {"rewards": [len(set(query)) / 10 for query in body["query"]]}) as url:
        yield f"{url}/get_reward"


def with_places(words: str, folder, judge: str, out) -> list[str]:
    """A documented command with models, data and folders that are here."""
    words = words.replace("owner/policy", f"{folder}/policy").replace("owner/judge", f"{folder}/judge")
    words = words.replace("owner/prompts", f"{folder}/prompts.jsonl")
    words = words.replace("./reward_func.py", f"{folder}/reward_func.py")
    words = words.replace("http://localhost:5000/get_reward", judge).replace("--use_wandb token", "")
    return [*shlex.split(words), *f"--save_path {out}/out --ckpt_path {out}/checkpoints".split()]


@pytest.mark.short(5)
@pytest.mark.parametrize("words", [words for words, *_ in RL_COMMANDS])
def test_a_documented_command_scaled_to_one_machine_trains_two_iterations(folder, judge, tmp_path, words):
    words = with_places(words, folder, judge, tmp_path)
    assert warm.run(["ppo", *words, *SCALED.split()], log=tmp_path / "log") == 0, (tmp_path / "log").read_text()
    rows = read_rows(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and all(row["skipped_steps"] == 0 for row in rows)
