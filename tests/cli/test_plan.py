"""`trimtab plan`, from words to what it prints."""

import pytest

from tests.tiny import tiny_model
from trimtab.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").config.save_pretrained(folder)  # no weights are needed
    return str(folder)


@pytest.fixture
def plan(trimtab, model):
    """What is said of a verb with these words and the tiny model."""

    def plan(verb: str, words: str) -> str:
        done = trimtab(f"plan {verb} --pretrain {model} {words}")
        assert done.code == 0, done.err
        return done.out

    return plan


@pytest.mark.parametrize("verb", ["sft", "rm", "prm", "dpo", "kto", "ppo", "grpo", "reinforce"])
def test_every_training_job_is_planned(verb, plan):
    told = plan(verb, "--bf16 --on H200")
    assert "working weights" in told and "fits: proposed passes" in told and "989 TFLOP/s in bf16" in told
    assert ("rollout  " in told) == (verb in ("ppo", "grpo", "reinforce"))
    assert ("chunked head" in told) == (verb != "rm")


def test_passes_that_were_given_are_kept_and_the_device_can_be_this_one(plan):
    told = plan("sft", "--max_len 64 --micro_train_batch_size 4")
    assert "activations of 256 tokens" in told and "the program" in told and "proposed" not in told
    assert "on RTX-4090, 8.0 GiB" in plan("sft", "--on 'rtx 4090' --device_memory 8")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("report", "is no training job"),
        ("sft --pretrain None", "--pretrain is missing"),
        ("sft --on H2000", "--on H2000: not known"),
        ("sft --max_lenn 3", "did you mean --max_len?"),
        ("sft --pretrain /nowhere/model", "/nowhere/model"),
        ("tail", "not planned"),
        ("sft --nproc 8 --shard_size 3", "--shard_size 3 must divide 8 processes"),
        ("sft --gpus 2 --on H100 --shard_size 3", "--shard_size 3 must"),
        *((f"sft --device_memory {size}", f"--device_memory is {size}: it must be") for size in ("0", "-3", "inf")),
        ("ppo --reward_pretrain /not/here", "--reward_pretrain /not/here: "),
        ("grpo --reward_pretrain /not/here", "--reward_pretrain /not/here: "),
        ("ppo --critic_pretrain /not/here", "--critic_pretrain /not/here: "),
        ("sft --nodes 2 --on CPU", "name one with --on"),
        ("ppo --nodes 0 --on H100", "--nodes is 0: it must be at least 1"),
        ("ppo --gpus 2 --network 0 --on H100", "--network is 0"),
        ("ppo --nodes 2 --on CPU", "name one with --on"),
        (
            "ppo --gpus 2 --on H100 --actor_num_gpus_per_node 8",
            "the options ask for 8 devices, and --nodes 1 --gpus 2 are 2",
        ),
        ("tail --gpus 2 --on H100", "not planned"),
        ("sft --load_in_4bit --lora_rank 4 --bf16", "4-bit"),
    ],
)
def test_a_mistake_is_one_line(words, problem, model, trimtab):
    verb, *rest = words.split()
    before = ["--pretrain", model] if verb != "report" else []
    assert problem in trimtab(f"plan {verb}", *before, *rest).mistake


def test_a_cluster_is_planned_layout_by_layout(plan):
    told = plan("grpo", "--bf16 --gpus 2 --on a800")
    assert "on 1 machine with 2 x A800-80G" in told and "what follows" in told
    for kind in ("hybrid", "pairs", "built-in engine"):
        assert f"\n  {kind} " in told
    assert "weights to the engines" in told and "assumed: 312 TFLOP/s in bf16" in told


def test_the_processes_of_a_machine_are_planned_as_the_options_split_the_job_over_them(plan):
    told = plan("grpo", "--bf16 --nproc 4 --zero_stage 3 --on H100")
    assert "in 4 processes (parameters 4, --zero_stage 3), each on H100" in told and "fits: proposed passes" in told
    assert "actor: weights, gathered to answer" in told and "fp32 masters, 1 / 4" in told
    told = plan("sft", "--nproc 2 --bf16 --on H100 --micro_train_batch_size 8 --max_len 32 --device_memory 0.001")
    assert "does not fit: " in told and "; try --" in told


def test_a_supervised_job_is_planned_layout_by_layout_on_machines(plan):
    words = "--bf16 --nodes 2 --gpus 2 --on h100-80g --max_len 64 --train_batch_size 8"
    told = plan("dpo", words)
    assert "on 2 machines with 2 x H100, 79.2 GiB each" in told and "memory of a process" in told
    assert "\n  --packing_samples --train_max_tokens_per_gpu" in told and "reference: weights" in told
    assert "as the options say: replicate 2 x parameters 2" in plan("dpo", f"{words} --zero_stage 3 --shard_size 2")


def test_a_size_stands_for_a_model_of_that_size(tmp_path, monkeypatch, plan):
    monkeypatch.chdir(tmp_path)
    told = plan("sft", "--pretrain 7B --bf16 --max_len 64 --on H200")
    assert told.startswith("sft of 7B on H200") and "working weights                            12.55" in told


def test_a_rehearsal_is_no_plan(capsys):
    assert main(["plan", "sft", "--pretrain", "7B", "--rehearse", "4"]) == 2
    assert "--rehearse measures, and plans nothing: trimtab sft" in capsys.readouterr().err
