"""`trimtab generate`: answers, scores, and what every trainer makes of them."""

import json
import os
import shutil
import signal
import time
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests import warm
from tests.cli.sft_job import write_rows
from trimtab.cli.main import main
from trimtab.embedded.sort_task import make_prompts
from trimtab.errors import RunFailed
from trimtab.evaluate.journal import Journal

FEW = ("--max_new_tokens", 6)
GENERATE = ("--pretrain", "model", "--output_path", "a.jsonl")
TRAIN = ("--max_len", 64, "--train_batch_size", 4, "--micro_train_batch_size", 4, "--max_epochs", 1)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def judge(made, tmp_path_factory):
    """A reward model that `trimtab rm` trained."""
    folder = tmp_path_factory.mktemp("judge") / "rm"
    words = ["--pretrain", made / "model", "--dataset", made / "pairs.jsonl", "--save_path", folder, *TRAIN]
    assert main(["rm", *map(str, words), "--ckpt_path", f"{folder}-ck"]) == 0
    return folder


@pytest.fixture
def prompts(place):
    return write_rows(place / "prompts.jsonl", make_prompts(6, seed=3))


@pytest.fixture
def generate(job):
    return job("generate")


def answer(generate, prompts, place, *words, name="answers.jsonl"):
    done = generate("--pretrain", "model", "--dataset", prompts, "--output_path", name, *FEW, *words)
    assert done.code == 0, done.err
    return rows_of(place / name)


def score(generate, judge, place, *words, data="answers.jsonl", name="scored.jsonl"):
    done = generate("--eval_task", "rm", "--pretrain", judge, "--dataset", data, "--output_path", name, *words)
    assert done.code == 0, done.err
    return rows_of(place / name)


# ---- generation


def test_greedy_answers_are_hugging_faces(generate, prompts, place):
    rows = answer(generate, prompts, place, "--greedy_sampling")
    model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
    assert [row["input"] for row in rows] == [row["input"] for row in rows_of(prompts)]
    for row in rows:
        ids = tokenizer.apply_chat_template(row["input"], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=1)
        assert row["output"] == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_answers_depend_on_the_seed_and_not_on_how_many_run_at_once(generate, prompts, place):
    often = ("--best_of_n", 3)
    first = answer(generate, prompts, place, *often)
    assert len(first) == 18 and len({row["output"] for row in first}) > 9
    assert answer(generate, prompts, place, *often, "--max_num_seqs", 2) == first
    assert answer(generate, prompts, place, *often, "--seed", 1) != first


def test_text_prompts_are_written_as_they_were_read(generate, place):
    path = write_rows(place / "texts.jsonl", [{"question": "sort 21"}, {"question": "{}"}])
    rows = answer(generate, path, place, "--input_key", "question", "--input_template", "Q: {}\nA:")
    assert [row["input"] for row in rows] == ["Q: sort 21\nA:", "Q: {}\nA:"]


def test_an_iteration_takes_its_slice_and_the_whole_is_the_sum_of_its_iterations(generate, prompts, place):
    whole = answer(generate, prompts, place)
    parts = [answer(generate, prompts, place, "--iter", k, "--rollout_batch_size", 4) for k in range(2)]
    assert [len(part) for part in parts] == [4, 2] and parts[0] + parts[1] == whole
    assert "has no effect" not in generate(*GENERATE, "--dataset", prompts, "--iter", 2).err
    past = generate(*GENERATE, "--dataset", prompts, "--iter", 9).mistake
    assert past.startswith("--iter 9 begins at prompt 18,432, but there are 6")


def test_a_wish_for_a_reward_is_read_by_the_model_and_not_written(generate, prompts, place):
    plain = answer(generate, prompts, place, "--greedy_sampling")
    wished = answer(generate, prompts, place, "--greedy_sampling", "--enable_csft", "--csft_prompt", "good")
    assert [row["input"] for row in wished] == [row["input"] for row in plain]
    assert [row["output"] for row in wished] != [row["output"] for row in plain]
    asked = [
        {"input": [{**turn, "content": f"{turn['content']} good "} for turn in row["input"]]}
        for row in rows_of(prompts)
    ]
    by_hand = answer(generate, write_rows(place / "by_hand.jsonl", asked), place, "--greedy_sampling")
    assert [row["output"] for row in by_hand] == [row["output"] for row in wished]


def test_answers_are_scored_while_they_are_written(generate, prompts, place):
    (place / "reward.py").write_text(REWARD.format("[float(len(l)) for l in labels]"))
    rows = answer(generate, prompts, place, "--remote_rm_url", "reward.py", "--label_key", "label", "--best_of_n", 2)
    expected = [float(len(row["label"])) for row in rows_of(prompts) for _ in range(2)]
    assert [row["reward"] for row in rows] == expected


# ---- scores


def test_a_score_is_the_reward_models_own(generate, prompts, place, judge):
    answers = answer(generate, prompts, place, "--best_of_n", 2)
    scored = score(generate, judge, place)
    assert [{k: v for k, v in row.items() if k != "reward"} for row in scored] == answers
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(judge), AutoTokenizer.from_pretrained(judge)
    for row in scored:
        text = tokenizer.apply_chat_template(row["input"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text + row["output"] + tokenizer.eos_token, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            expected = float(model(ids["input_ids"]).logits)
        assert row["reward"] == pytest.approx(expected, abs=1e-5)


def test_scoring_beside_generation_gives_the_same_scores(generate, prompts, place, judge):
    together = answer(generate, prompts, place, "--best_of_n", 2, "--reward_pretrain", judge)
    again = score(generate, judge, place)
    # An untrained model also writes special tokens, which no text shows.
    plain = [i for i, row in enumerate(together) if len(row["output"]) == 6]
    assert len(plain) > 6
    for i in plain:
        assert again[i]["reward"] == pytest.approx(together[i]["reward"], abs=1e-5)


def test_other_layouts_can_be_scored_and_scores_do_not_depend_on_the_passes(generate, place, judge):
    runs = [score(generate, judge, place, "--micro_batch_size", size, data="train.jsonl") for size in (1, 7)]
    found = [[row["reward"] for row in rows] for rows in runs]
    assert len(found[0]) == 16 and found[0] == pytest.approx(found[1], abs=1e-5)
    assert [turn["role"] for turn in runs[1][0]["input"]] == ["user"]


# ---- chains


@pytest.mark.parametrize(
    "processor, verb, words",
    [
        ("rs", "sft", ("--output_key", "output")),
        ("csft", "sft", ("--output_key", "output")),
        ("iter_dpo", "dpo", ()),
        ("iter_dpo", "rm", ()),
        ("kto", "kto", ("--output_key", "output")),
    ],
)
def test_a_trainer_reads_what_the_post_processor_writes(processor, verb, words, job, prompts, place, judge):
    generate = job("generate")
    answer(generate, prompts, place, "--best_of_n", 4)
    rows = score(generate, judge, place, "--post_processor", processor, name="rows.jsonl")
    trainer = job(verb)
    done = trainer("--pretrain", "model", "--dataset", "rows.jsonl", "--save_path", "out", *TRAIN, *words)
    assert done.code == 0, done.err
    tokenizer = trainer.run.tokenizer
    prompt = rows[0]["prompt" if processor == "iter_dpo" else "input"]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    answers = {row.get("output", row.get("chosen")) for row in rows} | {row.get("rejected") for row in rows}
    samples = trainer.samples()
    assert any(whole.startswith(text) for whole, _ in samples)
    if verb != "rm":  # nothing of a reward model's sequence is marked
        assert {trained for _, trained in samples} == {f"{one}<eos>" for one in answers if one is not None}


def test_text_rows_are_trained_on_as_they_were_read(job, place):
    path = write_rows(place / "texts.jsonl", [{"input": f"sort {i}1"} for i in range(4)])
    answer(job("generate"), path, place, "--input_template", "Q: {}\nA:")
    sft = job("sft")
    words = ("--output_key", "output", "--input_template", "None")
    assert sft("--pretrain", "model", "--dataset", "answers.jsonl", "--save_path", "out", *TRAIN, *words).code == 0
    assert {whole for whole, _ in sft.samples()} == {
        f"{row['input']}{row['output']}<eos>" for row in rows_of(place / "answers.jsonl")
    }


def mean_reward(outcome):
    return float(outcome.out.split("reward   mean ")[1].split(",")[0])


def test_three_rounds_of_iterative_dpo_raise_the_reward(job, place):
    prompts, policy, means = write_rows(place / "many.jsonl", make_prompts(96, seed=4)), "model", []
    generate, dpo = job("generate"), job("dpo")
    for iteration in range(3):
        done = generate(
            *("--pretrain", policy, "--dataset", prompts, "--iter", iteration, "--rollout_batch_size", 32, *FEW),
            *("--best_of_n", 4, "--reward_verifier", "regex([0-4])", "--post_processor", "iter_dpo"),
            *("--output_path", f"pairs{iteration}.jsonl"),
        )
        assert done.code == 0, done.err
        means.append(mean_reward(done))
        words = ("--max_len", 64, "--train_batch_size", 8, "--micro_train_batch_size", 8, "--learning_rate", 3e-3)
        data = ("--dataset", f"pairs{iteration}.jsonl", "--save_path", f"policy{iteration}", "--ckpt_path", "ck")
        done = dpo("--pretrain", policy, *data, *words)
        assert done.code == 0, done.err
        policy = f"policy{iteration}"
    done = generate(
        "--pretrain", policy, "--dataset", prompts, "--output_path", "end", *FEW, "--reward_verifier", "regex([0-4])"
    )
    means.append(mean_reward(done))
    assert means[2] > means[0] and means[3] > means[0] + 0.2, means


# ---- stopped and resumed


def killed(words, folder, lines: int):
    """The command in a process of its own, killed as soon as it has written so many lines."""
    partial = folder / "answers.jsonl.partial" / "0.jsonl"
    process = warm.start(["generate", *words])
    while process.is_alive() and not (partial.exists() and partial.read_bytes().count(b"\n") >= lines):
        time.sleep(0.005)
    process.kill()
    process.join()
    return partial.read_bytes().count(b"\n")


def test_a_killed_job_goes_on_without_repeating_or_losing_a_row(generate, place):
    prompts = write_rows(place / "many.jsonl", make_prompts(60, seed=4))
    words = ["--pretrain", "model", "--dataset", str(prompts), "--max_new_tokens", "12", "--best_of_n", "2"]
    words += ["--output_path", "answers.jsonl", "--max_num_seqs", "4", "--reward_verifier", "length(1-40)"]
    done = killed(words, place, 5)
    assert 0 < done < 60
    outcome = generate(*words)
    assert outcome.code == 0 and f"{done} of 60 prompts are done already" in outcome.out
    resumed = rows_of(place / "answers.jsonl")
    assert generate(*words[:-4], "--output_path", "whole.jsonl", "--reward_verifier", "length(1-40)").code == 0
    assert resumed == rows_of(place / "whole.jsonl") and len(resumed) == 120


@pytest.mark.parametrize("task", ["generate", pytest.param("rm", marks=pytest.mark.long)])
def test_two_processes_do_what_one_does(task, generate, prompts, place, judge):
    answer(generate, prompts, place, "--best_of_n", 2)
    words = ["--eval_task", "rm", "--pretrain", judge, "--dataset", "answers.jsonl", "--output_path", "two.jsonl"]
    if task == "generate":
        words = ["--pretrain", "model", "--dataset", prompts, "--best_of_n", 2, *FEW, "--output_path", "two.jsonl"]
    assert warm.run_world(["generate", *map(str, words)], 2) == [0, 0]
    assert generate(*words[:-1], "one.jsonl").code == 0
    one, two = (rows_of(place / f"{name}.jsonl") for name in ("one", "two"))
    scores = [[row.pop("reward", 0.0) for row in rows] for rows in (one, two)]
    assert len(one) == 12 and one == two and scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_stopped_scoring_goes_on(generate, place, judge, monkeypatch):
    from trimtab.evaluate import generation

    monkeypatch.setattr(generation, "ROWS_SCORED_AT_ONCE", 4)
    words = ("--eval_task", "rm", "--pretrain", judge, "--dataset", "train.jsonl", "--output_path")
    assert generate(*words, "whole.jsonl").code == 0
    plain, seen = generation.Scoring.sequences, []

    def interrupted(self, items):
        seen.append(items)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, items)

    monkeypatch.setattr(generation.Scoring, "sequences", interrupted)
    stopped = generate(*words, "part.jsonl")
    assert stopped.code == 130 and "stopped after 8 of 16 answers; the same command goes on" in stopped.err
    assert generate(*words, "part.jsonl").code == 0
    assert [items for items in seen if items == seen[0]] == [seen[0]]
    assert rows_of(place / "part.jsonl") == rows_of(place / "whole.jsonl")


@pytest.fixture
def unfinished(monkeypatch):
    """Every job stops before its rows become the output, as one that was killed at the end."""

    def finish(self, rows):
        raise RunFailed("stopped")

    def without_end(generate, *words):
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "finish", finish)
            assert generate(*words).code == 1

    return without_end


def test_other_settings_do_not_mix_with_unfinished_work(generate, prompts, place, unfinished):
    words = (*GENERATE, "--dataset", prompts, *FEW)
    unfinished(generate, *words)
    again = generate(*words, "--seed", 5)
    assert "a.jsonl.partial holds unfinished work with another seed" in again.mistake
    assert generate(*words).code == 0


def test_scores_of_two_columns_do_not_mix(generate, place, judge, unfinished):
    rows = [{"input": "sort 21", "output": "12", "second": "21", "question": "sort 12"}] * 3
    write_rows(place / "rows.jsonl", rows)
    words = ("--eval_task", "rm", "--pretrain", judge, "--dataset", "rows.jsonl", "--output_path", "scored.jsonl")
    unfinished(generate, *words)
    for other in (("--output_key", "second"), ("--input_key", "question")):
        assert "unfinished work with another choice of columns" in generate(*words, *other).mistake
    assert generate(*words).code == 0


REWARD = "def reward_func(queries, prompts, labels):\n    return {}\n"
CONSTANT = REWARD.format("[{}] * len(queries)")


@pytest.mark.parametrize("source", ["model", "function", "label"])
def test_answers_scored_by_a_reward_that_changed_do_not_mix(source, generate, place, judge, unfinished):
    prompts = write_rows(place / "p.jsonl", [{**row, "other": "1"} for row in make_prompts(3, seed=3)])
    words = [*GENERATE, "--dataset", prompts, *FEW, "--label_key", "label"]
    if source == "model":
        shutil.copytree(judge, place / "mine")
        words += ["--reward_pretrain", "mine"]
    else:
        (place / "reward.py").write_text(CONSTANT.format(1.0))
        words += ["--remote_rm_url", "reward.py"]
    unfinished(generate, *words)
    if source == "model":
        weights = load_file(place / "mine" / "model.safetensors")
        changed = {name: tensor + 1 for name, tensor in weights.items()}
        save_file(changed, place / "mine" / "model.safetensors", metadata={"format": "pt"})
    elif source == "function":
        (place / "reward.py").write_text(CONSTANT.format(2.0))
    else:
        words[-3:-2] = ["other"]
    what = "reward" if source == "label" else "content of the reward"
    assert f"holds unfinished work with another {what}:" in generate(*words).mistake


def test_a_reward_that_failed_at_once_may_be_corrected(generate, prompts, place):
    (place / "reward.py").write_text(CONSTANT.format("1 / 0"))
    words = (*GENERATE, "--dataset", prompts, *FEW, "--remote_rm_url", "reward.py")
    assert generate(*words).code == 1
    (place / "reward.py").write_text(CONSTANT.format("3.0"))
    assert generate(*words).code == 0
    assert {row["reward"] for row in rows_of(place / "a.jsonl")} == {3.0}


# ---- mistakes and notes


@pytest.mark.parametrize(
    "words, line",
    [
        (("--post_processor", "rs"), "--post_processor rs needs rewards: name one"),
        (("--post_processor", "rs", "--reward_verifier", "exact"), "--post_processor rs compares the answers"),
        (
            ("--eval_task", "rm", "--post_processor", "best"),
            "--post_processor is best: it must be rs, iter_dpo, kto or",
        ),
        (("--eval_task", "guess"), "--eval_task is guess: it must be generate, generate_vllm or rm"),
        (("--eval_task", "rm", "--reward_verifier", "exact"), "with --eval_task rm the reward model is --pretrain"),
        (("--enable_csft", "--reward_verifier", "exact"), "--enable_csft: a reward would read the wish too"),
        (("--reward_template", "no holes"), "--reward_template 'no holes': {reward} must stand where the reward"),
        (("--temperature", -1), "--temperature is -1: it must be at least 0"),
        (("--tp_size", 64), "--tp_size 64 asks for more GPUs than the"),
        (("--max_new_tokens", 300, "--output_path", "."), "--output_path . is a folder: give a file"),
        (
            ("--eval_task", "rm"),
            "--pretrain model: a model without a trained score head; make one of it with trimtab rm",
        ),
    ],
)
def test_a_mistake_is_one_line(generate, place, words, line):
    rows = write_rows(place / "rows.jsonl", [{"input": "a", "output": "b"}])
    assert generate(*GENERATE, "--dataset", rows, *words).mistake.startswith(line)


def test_a_dry_run_finds_labels_that_are_missing(generate, place):
    rows = write_rows(place / "rows.jsonl", [{"input": "a", "label": "b"}, {"input": "c", "label": None}])
    words = (*GENERATE, "--dataset", rows, "--reward_verifier", "exact")
    found = generate(*words, "--label_key", "label", "--dry_run")
    assert found.code == 2 and "1 of 2 prompts of the prompt data have none (the first: " in found.err


def test_a_dry_run_tries_the_reward(generate, place):
    rows = write_rows(place / "rows.jsonl", [{"input": "a", "label": "b"}])
    words = (*GENERATE, "--dataset", rows, "--label_key", "label", "--dry_run")
    tried = generate(*words, "--reward_verifier", "exact")
    assert tried.code == 0 and "# reward, tried on the first prompt: 1 for 'b', 0 for " in tried.out
    (place / "broken.py").write_text("def judge(prompts, completions, **columns):\n    raise ValueError('no judge')\n")
    broken = generate(*words, "--reward_func", f"{place}/broken.py:judge")
    assert broken.code == 2 and "the reward was tried and failed" in broken.err and "no judge" in broken.err


def test_what_has_no_effect_is_said(generate, prompts, place):
    done = generate(
        *(*GENERATE, "--dataset", prompts, "--dry_run"),
        *("--eval_task", "generate_vllm", "--tp_size", 1, "--zero_stage", 3, "--max_len", 99, "--normalize_reward"),
    )
    assert done.code == 0 and done.err.splitlines() == [
        "trimtab generate: warning: --max_len has no effect with --eval_task generate_vllm",
        "trimtab generate: warning: the built-in engine writes the answers; vLLM is not needed",
        "trimtab generate: warning: --zero_stage 3 has no effect: every process holds the whole model",
        "trimtab generate: warning: --normalize_reward has no effect without --post_processor csft",
    ]
    assert "# 6 prompts, 6 answers" in done.out and not (place / "a.jsonl").exists()


def test_an_answer_longer_than_the_context_ends_there(generate, prompts, place):
    done = generate(*GENERATE, "--dataset", prompts, "--greedy_sampling")
    assert done.code == 0 and "answers were cut at --max_new_tokens or the model's context" in done.out
    tokenizer = AutoTokenizer.from_pretrained("model")
    lengths = [len(tokenizer(row["output"])["input_ids"]) for row in rows_of(place / "a.jsonl")]
    assert 128 < max(lengths) < 256


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_reward_sleeps_stops_at_once_and_the_same_command_goes_on(prompts, place, number):
    reward = place / "slow.py"
    reward.write_text(SLEEPS_ONCE.format(flag=str(place / "awake")))
    words = ["generate", "--pretrain", "model", "--dataset", str(prompts), "--output_path", "slow.jsonl"]
    words += [*map(str, FEW), "--reward_func", str(reward)]
    log = place / "log"
    process = warm.start(words, prepare=partial(os.chdir, place), log=log)
    warm.wait_until((place / "asleep").exists, process)
    began = time.monotonic()
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == 128 + number and time.monotonic() - began < 5.0
    assert "stopped after 0 of 6 prompts; the same command goes on from there" in log.read_text()
    (place / "awake").touch()
    assert main(words) == 0
    assert [row["reward"] for row in rows_of(place / "slow.jsonl")] == [0.5] * 6


SLEEPS_ONCE = """
import pathlib, time

def reward_func(queries, prompts, labels):
    awake = pathlib.Path({flag!r})
    if not awake.exists():
        awake.with_name("asleep").touch()
        time.sleep(1000)
    return [0.5] * len(queries)
"""


@pytest.mark.parametrize(
    "words",
    [
        "sft --pretrain adapter --dataset train.jsonl",
        "dpo --pretrain model --ref_pretrain adapter --dataset pairs.jsonl",
        "rm --pretrain adapter --dataset pairs.jsonl",
        "grpo --pretrain model --reward_pretrain adapter --prompt_data train.jsonl",
        "generate --pretrain adapter --dataset train.jsonl --output_path answers.jsonl",
        "chat --pretrain adapter",
        "serve-rm --reward_pretrain adapter",
    ],
)
def test_an_adapter_in_place_of_a_model_is_answered_with_the_command_that_merges_it(job, tmp_path, words):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "model"}')
    verb, *rest = words.split()
    merge = "trimtab lora-combine --model_path model --lora_path adapter --output_path adapter-merged"
    assert job(verb)(*rest).mistake.endswith(f"adapter: an adapter, not a model; merge it first: {merge}")
