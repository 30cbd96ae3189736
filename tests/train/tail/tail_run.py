"""A small tail run through the real command, and everything that two equal runs must agree on."""

import json
from pathlib import Path

import torch

from trimtab.evaluate.tail_risk import read_bad_texts

REWARD = "--reward_verifier regex([0-4]):1.0,length(0-6):0.5"
REPULSE = "--method repulse --proposal_learning_rate 3e-3 --alpha 0.5 --target_dist_beta -3"
METHODS = {
    "ppo": "--method ppo --critic_learning_rate 1e-2",
    "reinforce": "--method reinforce",
    "reinforce_transform": "--method reinforce_transform --alpha 0.5 --target_dist_beta -1",
    "base_proposal": "--method base_proposal --alpha 0.5 --target_dist_beta -3 --push_down_scale per_group",
    "repulse": REPULSE,
    "lora": f"{REPULSE} --proposal_lora_rank 4",
    "two_loras": f"{REPULSE} --proposal_lora_rank 4 --lora_rank 4",
    "linear_head": f"{REPULSE} --proposal modulation_linear_head",
    "twist_model": f"{REPULSE} --proposal modulation_model",
    "nn_head": f"{REPULSE} --proposal modulation_nn_head --init_kl_coef 0",
    "rounds": f"{REPULSE} --proposal_updates 2 --init_kl_coef 0 --proposal_loss ctl_nosecondterm --start_alpha 5 "
    "--start_target_dist_beta -1",
}


def arguments(folder: Path, out: Path, method: str, *more: str) -> list[str]:
    fixed = (
        f"tail {METHODS[method]} --pretrain {folder}/model --prompt_data {folder}/prompts.jsonl --label_key label "
        f"--apply_chat_template {REWARD} --prompt_max_len 40 --generate_max_len 8 --n_samples_per_prompt 4 "
        f"--rollout_batch_size 4 --train_batch_size 16 --micro_train_batch_size 4 --micro_rollout_batch_size 8 "
        f"--num_episodes 2 --actor_learning_rate 3e-3 --bad_threshold 0.6 --save_steps 2 "
        f"--evaluate_heldout_sampling --heldout_prompt_data {folder}/test.jsonl --save_negdata "
        f"--save_negdata_threshold 0.6 --keep_dropout --save_path {out} --ckpt_path {out}/checkpoints"
    )
    return [*fixed.split(), *" ".join(more).split()]


def metric_files(out: Path) -> dict[str, object]:
    """What the run's metric files hold, by the first word of their names."""
    found = {}
    for path in sorted(out.iterdir()):
        if path.suffix == ".json" and path.name.startswith("info_eval_"):
            found["summary"] = json.loads(path.read_text())
        elif path.name.startswith(("info_eval_", "analyticlogprob_", "f_q_")):
            parts = torch.load(path, weights_only=True)
            found[path.name.split("_")[0]] = [torch.as_tensor(part).tolist() for part in parts]
        elif path.name.startswith("neg_data_"):
            found["texts"] = read_bad_texts(path)
    return found
