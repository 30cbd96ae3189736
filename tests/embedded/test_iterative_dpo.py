"""Iterative DPO on the embedded task, by its commands: a model that mostly sorts the wrong way round learns better."""

import pytest

from trimtab.cli.main import main
from trimtab.embedded import sort_task

ROUNDS, PROMPTS = 3, 256


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> str:
        code = main([str(word) for word in words])
        found = capsys.readouterr()
        assert code == 0, found.err
        return found.out

    return run


@pytest.mark.long
def test_three_rounds_raise_the_share_of_right_answers(run):
    sort_task.write("task", seed=0, train_rows=12_800, descending_share=0.65, judged_rows=ROUNDS * PROMPTS)
    train = ("--max_len", 64, "--max_epochs", 1, "--ckpt_path", "checkpoints")
    batches = ("--train_batch_size", 64, "--micro_train_batch_size", 64, "--learning_rate", 2e-3)
    run("sft", "--pretrain", "task/model", "--dataset", "task/train.jsonl", "--save_path", "policy", *train, *batches)
    judged = ("--max_new_tokens", 10, "--reward_verifier", "exact", "--label_key", "label")

    def success(policy: str) -> float:
        told = run(
            *("generate", "--pretrain", policy, "--dataset", "task/prompts_test.jsonl", "--best_of_n", 4, *judged),
            *("--output_path", "held_out.jsonl"),
        )
        return float(told.split("mean ")[1].split(",")[0])

    policy, found = "policy", [success("policy")]
    for number in range(ROUNDS):
        run(
            *("generate", "--pretrain", policy, "--dataset", "task/prompts.jsonl", "--best_of_n", 8, *judged),
            *("--iter", number, "--rollout_batch_size", PROMPTS, "--post_processor", "iter_dpo"),
            *("--output_path", f"pairs-{number}.jsonl"),
        )
        run(
            *("dpo", "--pretrain", policy, "--dataset", f"pairs-{number}.jsonl", "--save_path", f"round-{number}"),
            *(*train, "--train_batch_size", 32, "--micro_train_batch_size", 32),
            *("--learning_rate", 1e-4, "--beta", 0.1, "--nll_loss_coef", 1.0),
        )
        policy = f"round-{number}"
        found.append(success(policy))
    assert 0.15 < found[0] < 0.45, found
    assert found[1] > found[0] + 0.05 and found[3] > found[1] and found[3] > found[0] + 0.2, found
