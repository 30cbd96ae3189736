"""Every estimator solves the embedded task: from a model that sorts the wrong way round two times in three."""

import pytest

from tests import warm
from trimtab.embedded import sort_task
from trimtab.train.metrics import read_rows

GROUPS = "--n_samples_per_prompt 8 --rollout_batch_size 32 --train_batch_size 256 --init_kl_coef 0"
RECIPES = {
    "group_norm": f"grpo {GROUPS}",
    "dr_grpo": f"grpo --advantage_estimator dr_grpo {GROUPS}",
    "rloo": f"rloo {GROUPS}",
    "reinforce_baseline": f"reinforce --advantage_estimator reinforce_baseline {GROUPS}",
    "reinforce": f"reinforce {GROUPS}",
    "gae": f"ppo {GROUPS} --critic_learning_rate 1e-3",
    "dapo": "dapo --rollout_batch_size 32 --train_batch_size 256 --vllm_generate_batch_size 64",
    "gspo": f"grpo --policy_loss_type gspo {GROUPS}",
    "cispo": f"grpo --policy_loss_type cispo {GROUPS}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = sort_task.write(tmp_path_factory.mktemp("task"), descending_share=0.65)
    words = (
        f"sft --pretrain {folder}/model --dataset {folder}/train.jsonl --apply_chat_template --input_key messages "
        f"--max_len 64 --max_epochs 1 --train_batch_size 64 --micro_train_batch_size 64 --learning_rate 2e-3 "
        f"--save_path {folder}/sft --ckpt_path {folder}/checkpoints"
    )
    assert warm.run(words.split()) == 0
    return folder


@pytest.mark.long
@pytest.mark.parametrize("estimator", RECIPES)
def test_the_estimator_raises_held_out_success_above_85_percent(folder, tmp_path, estimator):
    words = (
        f"{RECIPES[estimator]} --pretrain {folder}/sft --prompt_data {folder}/prompts.jsonl --label_key label "
        f"--apply_chat_template --reward_verifier exact --generate_max_len 12 --prompt_max_len 64 "
        f"--use_dynamic_batch --actor_learning_rate 3e-4 --eval_dataset {folder}/prompts_test.jsonl "
        f"--eval_temperature 1.0 --eval_n_samples_per_prompt 1 --max_samples 1920 "
        f"--save_path {tmp_path} --ckpt_path {tmp_path}/checkpoints"
    )
    assert warm.run(words.split()) == 0
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if "eval_pass_1" in row]
    assert rows[0]["eval_pass_1"] < 0.5
    assert rows[-1]["eval_pass_1"] > 0.85
