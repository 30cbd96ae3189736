import pytest

import trimtab
from trimtab.api.arguments import as_arguments
from trimtab.config.rl_jobs import GRPOOptions

NAMES = {"pretrain": "model", "prompt_data": "prompts", "load_checkpoint": "resume"}


@pytest.mark.parametrize(
    "text, told",
    [
        ("--pretrain is missing: give a model folder", "model is missing: give a model folder"),
        ("--pretrain ./m: no such folder", "model=./m: no such folder"),
        ("--init_kl_coef is -1: lower --kl_target", "init_kl_coef is -1: lower kl_target="),
        ("a prompt is too long: --prompt_max_len 8 is less", "a prompt is too long: prompt_max_len=8 is less"),
        ("lower it, or --eps_clip_low_high 0.2 0.28", "lower it, or eps_clip_low_high=(0.2, 0.28)"),
        ("add --bf16, or --ray False", "add bf16=True, or ray=False"),
        ("use --rollout_engine vllm with --reward_func FILE.py", "use rollout_engine=vllm with reward_func=FILE.py"),
        ("no column 'a' (--label_key) in the data", "no column 'a' (label_key=) in the data"),
        ("finish the run (--load_checkpoint)", "finish the run (resume=True)"),
        ("TRL's x is --num_generations here", "TRL's x is num_generations= here"),
        ("trimtab grpo --help all lists them", "trimtab grpo --help all lists them"),
        ("merge it: trimtab lora-combine --model_path m --bf16; or --bf16",
         "merge it: trimtab lora-combine --model_path m --bf16; or bf16=True"),
        ("a file -- of mine --nothing", "a file -- of mine --nothing"),
    ],
)  # fmt: skip
def test_options_in_a_text_become_arguments_and_shell_commands_stay(text, told):
    assert as_arguments(text, GRPOOptions, NAMES) == told


@pytest.mark.parametrize("reward", ["exakt", "accuracy", "exakt:0.5,format"])
def test_a_text_that_is_no_reward_is_told_what_a_reward_may_be(reward, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(trimtab.UserError) as raised:
        trimtab.grpo("owner/model", ["a"], reward)
    told = str(raised.value)
    assert told.startswith(f"reward {reward!r} is neither a verifier nor a folder: ")
    assert ("did you mean 'exact'?" in told) is reward.startswith("exakt")
    assert "a verifier (gsm8k, number, math, exact, regex, format, kk, length)" in told
