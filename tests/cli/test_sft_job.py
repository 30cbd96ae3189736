"""The SFT job from its words to its files: every form of data and of output, on a few steps."""

import json
import math
import shlex
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.sft_job import conversation, write_model, write_rows
from tests.samples import random_examples
from trimtab.data.batches import TokenBatch
from trimtab.distributed import device
from trimtab.distributed.device import find_device
from trimtab.embedded.sort_task import make_rows
from trimtab.models.load import load_policy
from trimtab.report.run_data import RunData
from trimtab.report.summary import facts
from trimtab.train.supervised import MANY_BAD_STEPS, SupervisedRun
from trimtab.train.supervised_tasks import SFTTask

MODEL = ("--pretrain", "model", "--max_len", "60", "--train_batch_size", "4", "--max_epochs", "1")
SHORT = (*MODEL, "--micro_train_batch_size", "2", "--learning_rate", "1e-2", "--lr_warmup_ratio", "0")
PLACES = ("--save_path", "out", "--ckpt_path", "checkpoints")
SORTING = (*SHORT, *PLACES, "--dataset", "train.jsonl")


@pytest.fixture
def trained(sft, tmp_path):
    """Run on these rows; the (text, trained part) of its samples."""

    def train(rows, *words):
        write_rows(tmp_path / "rows.jsonl", rows)
        ran = sft(*SHORT, *PLACES, "--dataset", "rows.jsonl", *words)
        assert ran.code == 0, ran.err
        losses = [row["loss"] for row in sft.rows(tmp_path / "out")]
        assert losses and all(math.isfinite(loss) for loss in losses)
        return sorted(sft.samples())

    return train


# ---- what is learnt


QUESTION = [{"question": "2", "response": "two"}]
KEYS = "--input_key question --output_key response"


@pytest.mark.parametrize(
    "rows, words, expected",
    [
        pytest.param(
            [conversation("a", "b", "c", "d")],
            *("", [("<user>a<assistant>b<eos><user>c<assistant>d<eos>", "d<eos>")]),
            id="single turn learns the last answer",
        ),
        pytest.param(
            [conversation("a", "b", "c", "d"), conversation("e", "f")],
            "--multiturn",
            [
                ("<user>a<assistant>b<eos><user>c<assistant>d<eos>", "b<eos>d<eos>"),
                ("<user>e<assistant>f<eos>", "f<eos>"),
            ],
            id="multiturn learns every answer",
        ),
        pytest.param(
            [{"text": "the sea"}, {"text": "a tide"}],
            "--pretrain_mode --input_key text",
            [("a tide<eos>", " tide<eos>"), ("the sea<eos>", "he sea<eos>")],
            id="pretrain mode learns all but the first token",
        ),
        (QUESTION, KEYS, [("User: 2\nAssistant: two<eos>", "two<eos>")]),
        (QUESTION, f"{KEYS} --input_template 'Q {{}} A '", [("Q 2 A two<eos>", "two<eos>")]),
        (QUESTION, f"{KEYS} --apply_chat_template", [("<user>2<assistant>two<eos>", "two<eos>")]),
        pytest.param(
            [{"input": "sort 21> <rm_score>: 5.00 ", "output": "12"}],
            "--output_key output --input_template None",
            [("sort 21> <rm_score>: 5.00 12<eos>", "12<eos>")],
            id="conditional rows keep their score and get no template",
        ),
        ([{"prompt": "2+2=", "completion": "4"}], "", [("2+2=4<eos>", "4<eos>")]),
    ],
)
def test_what_is_read_and_what_is_learnt_of_it(trained, rows, words, expected):
    assert trained(rows, *shlex.split(words)) == expected


def test_a_template_from_a_file(trained, tmp_path):
    (tmp_path / "turns.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    text, learnt = trained([conversation("a", "b")], "--tokenizer_chat_template", "turns.jinja")[0]
    assert (text, learnt) == ("[user]a[assistant]b<eos>", "b<eos>")


def test_sources_are_mixed_by_their_shares(sft, tmp_path):
    for name in "xyz":
        write_rows(tmp_path / f"{name}.jsonl", [conversation(name, str(i)) for i in range(60)])
    words = (*SHORT, *PLACES, "--dataset", "x.jsonl,y.jsonl,z.jsonl")
    assert sft(*words, "--dataset_probs", "0.6,0.4,0").code == 0
    counts = Counter(text.removeprefix("<user>")[0] for text, _ in sft.samples())
    assert 0.45 < counts["x"] / counts.total() < 0.75 and counts["z"] == 0
    assert sft(*words).code == 0
    assert Counter(text.removeprefix("<user>")[0] for text, _ in sft.samples()) == {"x": 60, "y": 60, "z": 60}


def test_a_mixture_of_experts_shows_its_balance(sft, tmp_path):
    words = (*SORTING, "--pretrain", "experts", "--aux_loss_coef", "0.01")
    assert sft(*words).code == 0
    assert all(row["aux_loss"] >= 1.9 for row in sft.rows(tmp_path / "out"))  # 2 choices a token: at least 2 if even


# ---- what is left on disk


def log_probs_of(model, examples):
    pieces = []
    for ids, mask in examples:
        logits = model(torch.from_numpy(ids)[None]).logits[0, :-1].float().log_softmax(-1)
        pieces.append(logits.gather(-1, torch.from_numpy(ids)[1:, None])[:, 0][torch.from_numpy(mask)[1:]])
    return torch.cat(pieces)


def assert_same_as_trained(sft, model):
    """The loaded model says what the trained one says."""
    examples = random_examples([9, 14, 5])
    sft.run.model.eval()
    with torch.no_grad():
        ours = sft.run.model(TokenBatch.of(examples)).log_probs_N
        theirs = log_probs_of(model.eval(), examples)
    assert (ours - theirs).abs().max() < 1e-5


def test_the_saved_model_is_the_trained_one(sft, tmp_path):
    assert sft(*SORTING).code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_as_trained(sft, model)
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert all(not torch.equal(value, start[name]) for name, value in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer.apply_chat_template(conversation("a", "b")["messages"], tokenize=False) == "<user>a<assistant>b<eos>"
    )


def test_the_saved_adapter_on_its_base_is_the_trained_model(sft, tmp_path):
    from peft import PeftModel

    assert sft(*SORTING, "--lora_rank", "4").code == 0
    assert not (tmp_path / "out" / "model.safetensors").exists()
    described = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["task_type"]) == (4, 16, "CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapted = PeftModel.from_pretrained(base, tmp_path / "out")
    assert_same_as_trained(sft, adapted)
    assert_same_as_trained(sft, adapted.merge_and_unload())
    with pytest.raises(AssertionError):
        assert_same_as_trained(sft, AutoModelForCausalLM.from_pretrained(tmp_path / "model"))


def test_bf16_is_saved_in_bf16_with_the_trained_weights(sft, tmp_path):
    assert sft(*SORTING, "--bf16").code == 0
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    for name, parameter in sft.run.model.model.named_parameters():
        assert torch.equal(parameter, saved[name])


def test_evaluation_uses_the_sources_test_split(sft, tmp_path):
    test = make_rows(6, seed=2, held_out=True)
    write_rows(tmp_path / "data" / "train.jsonl", make_rows(8, seed=1))
    write_rows(tmp_path / "data" / "test.jsonl", test)
    assert sft(*SHORT, *PLACES, "--dataset", "data", "--max_epochs", "2").code == 0
    rows = sft.rows(tmp_path / "out")
    assert ["eval_loss" in row for row in rows] == [False, True, False, True]
    # The last figure is the saved model's own loss on those rows.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    encoded = [
        sft.run.tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        for row in test
    ]
    examples = [(np.array(e["input_ids"]), np.array(e["assistant_masks"], dtype=bool)) for e in encoded]
    with torch.no_grad():
        expected = -log_probs_of(model, examples).mean().item()
    assert rows[-1]["eval_loss"] == pytest.approx(expected, abs=1e-5)


def test_eval_dataset_and_eval_steps_decide_what_and_when(sft, tmp_path):
    write_rows(tmp_path / "held.jsonl", make_rows(3, seed=2, held_out=True))
    words = (*SORTING, "--eval_dataset", "held.jsonl", "--eval_steps", "3")
    assert sft(*words).code == 0
    assert [row["step"] for row in sft.rows(tmp_path / "out") if "eval_loss" in row] == [3, 4]


def test_checkpoints_are_counted_and_come_with_models(sft, tmp_path):
    words = (*SORTING, "--save_steps", "1", "--save_hf_ckpt")
    assert sft(*words, "--max_ckpt_num", "2").code == 0
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name != ".lock")
    assert names == ["global_step3", "global_step3_hf", "global_step4", "global_step4_hf", "latest"]
    last = load_file(tmp_path / "checkpoints" / "global_step4_hf" / "model.safetensors")
    final = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(last[name], value) for name, value in final.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "global_step3_hf")


def test_models_without_resumable_state(sft, tmp_path):
    words = ("--save_steps", "2", "--save_hf_ckpt", "--disable_ds_ckpt")
    assert sft(*SORTING, *words).code == 0
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["global_step2_hf", "global_step4_hf"]


def test_tensorboard_has_the_same_losses(sft, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = (*SORTING, "--eval_dataset", "train.jsonl")
    assert sft(*words, "--use_tensorboard", "board", "--wandb_run_name", "mine").code == 0
    events = EventAccumulator(str(tmp_path / "board" / "mine"))
    events.Reload()
    rows = sft.rows(tmp_path / "out")
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (row["step"], pytest.approx(row["loss"])) for row in rows
    ]
    assert events.Scalars("eval/loss")[-1].value == pytest.approx(rows[-1]["eval_loss"])


def test_a_run_written_as_yaml_is_the_same_run(sft, tmp_path):
    printed = sft(*SORTING, "--dry_run")
    assert printed.code == 0 and not (tmp_path / "out").exists()
    assert "# model: LlamaForCausalLM" in printed.out and "give 4 steps" in printed.out
    assert sft(*SORTING).code == 0
    (tmp_path / "run.yaml").write_text(printed.out)
    assert sft("--config", "run.yaml", "--save_path", "again").code == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- numbers that are not finite


def test_weights_that_are_not_numbers_stop_the_run_after_a_few_steps(sft, tmp_path):
    path = write_model(tmp_path / "broken") / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.0.mlp.up_proj.weight"][3, 3] = math.nan
    save_file(weights, path, metadata={"format": "pt"})
    ran = sft(*SORTING, "--pretrain", "broken")
    assert ran.code == 2 and "is not finite: check the weights of --pretrain" in ran.err
    assert not (tmp_path / "out").exists()
    ran = sft(*SORTING, "--pretrain", "broken", "--max_epochs", "2", "--skip_checks", "all")
    assert ran.code == 1 and "Traceback" not in ran.err
    line = next(line for line in ran.err.splitlines() if "failed:" in line)
    assert line.startswith("trimtab sft: failed: loss or gradient was not finite in 5 steps in a row (last: step 5)")
    rows = sft.rows(tmp_path / "out")
    assert [row["skipped_steps"] for row in rows] == list(range(1, MANY_BAD_STEPS + 1))
    assert all(row["loss"] is None for row in rows)
    bad = json.loads((tmp_path / "out" / "bad_batch.json").read_text())
    assert bad["step"] == 5 and len(bad["rows"]) == len(bad["texts"]) == 4
    assert f"its 4 rows, such as {bad['rows'][0]}, are in" in line
    data = (tmp_path / "train.jsonl").read_text().splitlines()
    for place, text in zip(bad["rows"], bad["texts"]):
        path, number = place.split(", line ")
        assert path == "train.jsonl" and json.loads(data[int(number) - 1])["messages"][0]["content"] in text
    assert all(text.startswith("<user>sort ") for text in bad["texts"])
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_step_is_skipped_and_the_run_goes_on(sft, tmp_path, monkeypatch, bad):
    plain = SFTTask.loss
    moved = []

    def loss(task, policy, batch, totals):
        share = plain(task, policy, batch, totals)
        moved.append(policy.model.lm_head.weight.detach().clone())
        if len(moved) == 4:  # the second micro-batch of step 2
            share.loss = share.loss * bad
            share.figures = {name: value * bad for name, value in share.figures.items()}
        return share

    monkeypatch.setattr(SFTTask, "loss", loss)
    assert sft(*SORTING, "--skip_checks", "all").code == 0
    assert [row["skipped_steps"] for row in sft.rows(tmp_path / "out")] == [0, 1, 1, 1]
    before, after, last = moved[2], moved[4], moved[6]  # the weights that steps 2, 3 and 4 began with
    assert torch.equal(before, after) and not torch.equal(after, last)
    assert all(value.isfinite().all() for value in load_file(tmp_path / "out" / "model.safetensors").values())


# ---- four bits


def test_a_four_bit_base_trains_and_passes_gradients_on(sft, tmp_path):
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    write_model(tmp_path / "wide", hidden_size=64, spread=0.05)
    words = (*SORTING, "--eval_dataset", "train.jsonl", "--pretrain", "wide")
    assert sft(*words, "--load_in_4bit", "--bf16", "--lora_rank", "4", "--max_epochs", "3").code == 0
    rows = sft.rows(tmp_path / "out")
    assert rows[-1]["eval_loss"] < rows[0]["loss"]
    # As the loop gets it: after the self-check, which ran it in eval mode.
    policy = load_policy(sft.run.options, find_device()).model
    layer = next(module for module in policy.modules() if isinstance(module, Linear4bit))
    x = torch.randn(5, 64, dtype=torch.bfloat16, device=policy.device, requires_grad=True)
    layer(x).sum().backward()
    expected = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float().sum(0)
    assert (x.grad[0] - expected).abs().max() < 0.02 * expected.abs().max()


# ---- two Ctrl-C


def test_a_second_ctrl_c_leaves_at_once_and_names_the_checkpoint_that_there_is(sft, monkeypatch):
    plain = SupervisedRun.train_step

    def train_step(run, stop):
        if run.counters.step == 2:
            raise KeyboardInterrupt
        return plain(run, stop)

    monkeypatch.setattr(SupervisedRun, "train_step", train_step)
    ran = sft(*SORTING, "--save_steps", "1")
    line = "interrupted; the last checkpoint is checkpoints/global_step2; add --load_checkpoint to go on"
    assert ran.code == 130 and ran.err.splitlines()[-1] == f"trimtab sft: {line}"
    monkeypatch.setattr(SupervisedRun, "train_step", lambda run, stop: (_ for _ in ()).throw(KeyboardInterrupt))
    ran = sft(*SORTING)
    assert ran.code == 130 and "this run has no checkpoint to go on from" in ran.err


# ---- precision


def test_a_cpu_on_which_bf16_fails_trains_in_fp32_and_says_so(sft, tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("could not create a primitive\nstack trace: ...")

    monkeypatch.setattr(device, "_try_bf16", fail)
    device._bf16_fault.cache_clear()
    try:
        ran = sft(*SORTING, "--bf16")
    finally:
        device._bf16_fault.cache_clear()
    assert ran.code == 0
    assert "--bf16 does not work on this CPU (could not create a primitive): fp32 is used instead\n" in ran.err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["dtype"], manifest["bf16_fault"]) == ("float32", "could not create a primitive")


def test_bf16_that_works_stays_bf16_however_slow(sft, tmp_path, monkeypatch):
    monkeypatch.setattr(device.Device, "has_fast_bf16", lambda self: False)
    ran = sft(*SORTING, "--bf16")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert ran.code == 0 and manifest["dtype"] == "bfloat16" and "bf16_fault" not in manifest
    assert not manifest["exact"] and "it needs bf16, Triton" in manifest["not_exact"]
    assert ("exact", f"no: {manifest['not_exact']}") in facts(RunData(tmp_path / "out", manifest=manifest))
