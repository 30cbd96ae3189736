"""What reward models, DPO, KTO, PRM and distillation say of bad input, and what they leave on disk."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel

from tests.cli.sft_job import STEP_END, make_tokenizer, write_model, write_rows
from tests.train.job_run import labelled_rows, preference_rows
from trimtab.models.packed import scoring

MODEL = ("--pretrain", "model", "--max_len", "60", "--train_batch_size", "4", "--micro_train_batch_size", "2")
PLACES = ("--save_path", "out", "--ckpt_path", "checkpoints")
WORDS = {
    "rm": ("--dataset", "pairs.jsonl"),
    "prm": ("--dataset", "steps.jsonl", "--placeholder_token", STEP_END, "--reward_tokens", "+", "-"),
    "dpo": ("--dataset", "pairs.jsonl"),
    "kto": ("--dataset", "judged.jsonl"),
    "kd": ("--dataset", "train.jsonl", "--teacher_model", "other"),
}


@pytest.fixture
def refused(refused_alike, place):
    """What a command of the verb's usual words and these, perhaps on these rows, is refused with."""

    def refuse(verb, *words, rows=None):
        if rows is not None:
            write_rows(place / "rows.jsonl", rows)
            words = ("--dataset", "rows.jsonl", *words)
        return refused_alike(verb, *MODEL, *PLACES, *WORDS[verb], *words)

    return refuse


def without(rows: list[dict], *columns: str) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in columns} for row in rows]


# ---- pairs

PAIRS = preference_rows(4)


@pytest.mark.parametrize("verb", ["rm", "dpo"])
@pytest.mark.parametrize("column, other", [("chosen", "rejected"), ("rejected", "chosen")])
def test_a_side_of_the_pairs_that_is_missing_or_misnamed_lists_the_columns_found(refused, verb, column, other):
    line = refused(verb, rows=without(PAIRS, column))
    assert line == f"no column '{column}' (--{column}_key) in the data: found prompt, {other}, margin"
    for key in (column, "prompt"):
        line = refused(verb, f"--{key}_key", "answer")
        assert line == f"no column 'answer' (--{key}_key) in the data: found prompt, chosen, rejected, margin"


@pytest.mark.parametrize("verb", ["rm", "dpo"])
@pytest.mark.parametrize(
    "row, said",
    [
        ({"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]}, "one holds text and the"),
        ({"prompt": "a", "chosen": 7, "rejected": 8}, "rows.jsonl, line 1: column 'chosen' holds"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "wide"}, "column 'margin' holds"),
        ({"chosen": [{"role": "judge", "content": "b"}], "rejected": [{"role": "judge", "content": "c"}]}, "line 1"),
    ],
)
def test_a_pair_that_makes_no_sense_is_named_by_its_row(refused, verb, row, said):
    assert said in refused(verb, rows=[row])


def test_texts_without_turns_for_a_chat_template(refused):
    line = refused("dpo", "--apply_chat_template", rows=[{"chosen": "yes", "rejected": "no"}])
    assert "--apply_chat_template needs to know the turns" in line and "--prompt_key" in line


def test_nothing_left_of_the_pairs_after_filtering(refused):
    line = refused("dpo", "--max_len", "5")
    assert "no row of the train data is left: of 8, 8 have nothing to learn within 5 tokens (raise --max_len)" in line


# ---- reward models


@pytest.mark.parametrize("flag, data", [("--dataset", "train"), ("--eval_dataset", "evaluation")])
def test_a_margin_loss_without_margins(refused, place, flag, data):
    write_rows(place / "plain.jsonl", without(PAIRS, "margin"))
    line = refused("rm", "--margin_loss", flag, "plain.jsonl")
    assert line == f"--margin_loss: the {data} data have no column margin; add it or drop the option"


def test_a_reward_model_from_an_encoder(refused, place):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = make_tokenizer()
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(place / "encoder")
    tokenizer.save_pretrained(place / "encoder")
    line = refused("rm", "--pretrain", "encoder")
    assert line == "--pretrain encoder: BertForSequenceClassification is not a decoder with a score head"


# ---- DPO and its relatives


@pytest.mark.parametrize("verb", ["dpo", "kto"])
def test_a_reference_with_another_tokenizer(refused, place, verb):
    write_model(place / "foreign")
    described = json.loads((place / "foreign" / "tokenizer.json").read_text())
    words = described["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    (place / "foreign" / "tokenizer.json").write_text(json.dumps(described))
    line = refused(verb, "--ref_pretrain", "foreign")
    assert line.startswith("--ref_pretrain foreign: its token ") and "is '2', --pretrain's is '1'" in line


@pytest.mark.parametrize(
    "removed, said", [("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer.json")]
)
def test_a_reference_that_lacks_a_part(refused, place, removed, said):
    shutil.copytree(place / "model", place / "part")
    (place / "part" / removed).unlink()
    if removed == "tokenizer.json":
        (place / "part" / "tokenizer_config.json").unlink()
    line = refused("dpo", "--ref_pretrain", "part")
    assert line.startswith("--ref_pretrain part: ") and said in line


# ---- KTO

JUDGED = labelled_rows(4)


def test_a_missing_label_column(refused):
    assert refused("kto", rows=without(JUDGED, "label")) == (
        "no column 'label' (--label_key) in the data: found prompt, completion"
    )
    assert "no column 'score' (--label_key)" in refused("kto", "--label_key", "score")


@pytest.mark.parametrize("label", ["good", 0.5, 2, None])
def test_a_label_that_is_neither_good_nor_bad(refused, label):
    line = refused("kto", rows=[{**JUDGED[0], "label": label}])
    assert line.startswith("rows.jsonl, line 1: column 'label' holds ") and "true or false (or 1 or 0)" in line


def test_labels_of_texts_without_an_answer(refused):
    line = refused("kto", rows=[{"text": "a b c", "label": True}])
    assert "without an answer that the label could be about" in line and "--output_key" in line


# ---- PRM


def steps(text: str, label: object) -> list[dict]:
    return [{"input": text.replace("#", STEP_END), "label": label}]


@pytest.mark.parametrize(
    "words, said",
    [
        (("--placeholder_token", "abc"), "--placeholder_token 'abc' is 3 tokens of this tokenizer"),
        (("--reward_tokens", "good", "-"), "--reward_tokens 'good' is 4 tokens of this tokenizer"),
    ],
)
def test_tokens_of_a_process_reward_model_that_will_not_do(refused, words, said):
    assert said in refused("prm", *words)


@pytest.mark.parametrize(
    "rows, words, said",
    [
        (steps("a# b#", ["+"]), "", f"rows.jsonl, line 1: 1 labels for 2 placeholders '{STEP_END}'"),
        (steps("a b", ["+"]), "", "1 labels for 0 placeholders"),
        (steps("a#", "+"), "", "column 'label' holds"),
        (steps("a#", ["yes"]), "", "label 'yes' is none of --reward_tokens + -"),
        (steps("a#", [1.5]), "", "a reward token or a number from 0 to 1 is needed"),
        (steps("a#", [0.5]), "--reward_tokens + - 0", "which needs exactly two --reward_tokens"),
        (steps("a#", [0.5]), "--reward_tokens None", "say what it stands for with --reward_tokens"),
        (steps("a#", ["yes"]), "--reward_tokens None", "label 'yes' is 3 tokens of this tokenizer"),
        ([{"prompt": "a", "completions": ["b", "c"], "labels": [True]}], "", "1 labels for 2 steps"),
        ([{"question": "a", "labels": [True]}], "", "no columns 'input' (--input_key) and 'label' (--label_key)"),
    ],
)
def test_judged_steps_that_make_no_sense(refused, rows, words, said):
    assert said in refused("prm", *words.split(), rows=rows)


# ---- distillation


def test_a_teacher_of_another_size_of_vocabulary(refused, place):
    write_model(place / "narrow", vocab_size=40)
    line = refused("kd", "--teacher_model", "narrow")
    assert line.startswith("--teacher_model narrow: its vocabulary (40 outputs) is not the student's (")


def test_a_teacher_with_other_words_of_the_same_number(refused, place):
    write_model(place / "foreign")
    path = place / "foreign" / "tokenizer.json"
    path.write_text(path.read_text().replace('"<unk>"', '"<what>"'))
    line = refused("kd", "--teacher_model", "foreign")
    assert line.startswith("--teacher_model foreign: its tokenizer is not --pretrain's")


# ---- what is left on disk

LEFT = {"metrics.jsonl", "options.yaml", "manifest.json", "report.html", "tokenizer.json", "tokenizer_config.json"}
LEFT |= {"chat_template.jinja", ".lock"}
FIGURES = {
    "rm": {"accuracy", "chosen_reward", "rejected_reward"},
    "prm": {"accuracy"},
    "dpo": {"accuracy", "chosen_reward", "rejected_reward", "reward_margin"},
    "kto": {"kl", "chosen_reward", "rejected_reward"},
    "kd": {"nll", "distance"},
}
FASTER = ("--learning_rate", "1e-2", "--lr_warmup_ratio", "0", "--save_steps", "2")


def trained(job, verb, *words):
    """A run of two steps with its evaluation, and its folder."""
    command = job(verb)
    held = WORDS[verb][1]
    ran = command(*MODEL, *PLACES, *WORDS[verb], *FASTER, "--eval_dataset", held, "--eval_split", "train", *words)
    assert ran.code == 0, ran.err
    return command, command.folder / "out"


@pytest.mark.parametrize("verb", WORDS)
def test_a_run_leaves_a_model_its_figures_and_its_story(job, verb):
    command, folder = trained(job, verb)
    extra = {"rewards.json"} if verb == "rm" else {"generation_config.json"}
    assert {path.name for path in folder.iterdir()} == LEFT | extra | {"model.safetensors", "config.json"}
    rows = command.rows(folder)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 2
    assert all(FIGURES[verb] | {"loss", "grad_norm"} <= row.keys() for row in rows)
    assert {f"eval_{name}" for name in FIGURES[verb] | {"loss"}} <= rows[-1].keys()
    described = json.loads((folder / "manifest.json").read_text())
    assert described["job"] == verb and described["data"]["rows_kept"] == len(rows) * 4
    assert (command.folder / "checkpoints" / f"global_step{len(rows)}" / "state.json").exists()
    page = (folder / "report.html").read_text()
    assert f"{len(rows)} steps" in page
    AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("verb", ["prm", "dpo", "kto", "kd"])
def test_the_saved_policy_is_the_trained_one(job, verb):
    command, folder = trained(job, verb)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = command.batches[0].sequence(0)
    with scoring(command.run.model):
        ours = command.run.model.inner.lm_head(command.run.model.hidden(command.batches[0])[0][: len(ids)])
        theirs = model(ids[None]).logits[0]
    assert (ours - theirs).abs().max() < 1e-4
    start = load_file(command.folder / "model" / "model.safetensors")
    assert not any(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def scores_of(model, command) -> torch.Tensor:
    """By Hugging Face's own forward pass, sequence by sequence."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(command.batches[0].sequence(i)[None]).logits[0] for i in range(4)])


def test_the_saved_reward_model_scores_as_the_trained_one_and_says_how_rewards_lie(job):
    command, folder = trained(job, "rm")
    with scoring(command.run.model):
        ours = command.run.model(command.batches[0]).scores_S
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert (ours - scores_of(model, command)).abs().max() < 1e-5
    told = json.loads((folder / "rewards.json").read_text())
    pairs = torch.tensor(told["chosen_rejected"], dtype=torch.float64)
    assert pairs.shape == (8, 2) and told["source"] == "evaluation"
    assert model.config.mean == pytest.approx(pairs.mean().item())
    assert model.config.std == pytest.approx(pairs.std().item())
    accuracy = (pairs[:, 0] > pairs[:, 1]).double().mean().item()
    assert command.rows(folder)[-1]["eval_accuracy"] == pytest.approx(accuracy)


def test_a_reward_model_can_be_trained_further_and_keeps_its_head(job, place):
    trained(job, "rm")
    shutil.copytree(place / "out", place / "first")
    command = job("rm")
    assert command(*MODEL, *PLACES, *WORDS["rm"], "--pretrain", "first", "--learning_rate", "0").code == 0
    first, second = (load_file(place / name / "model.safetensors")["score.weight"] for name in ("first", "out"))
    assert torch.equal(first, second)


def test_a_head_under_another_name_comes_back_under_it(job, place):
    command, folder = trained(job, "rm", "--value_prefix_head", "value_head")
    assert "value_head.weight" in load_file(folder / "model.safetensors")
    with scoring(command.run.model):
        before = command.run.model(command.batches[0]).scores_S
    shutil.copytree(folder, place / "first")
    again = job("rm")
    assert again(*MODEL, *PLACES, *WORDS["rm"], "--pretrain", "first", "--learning_rate", "0").code == 0
    with scoring(again.run.model):
        after = again.run.model(command.batches[0]).scores_S
    assert torch.equal(before, after)


@pytest.mark.parametrize("verb", WORDS)
def test_with_lora_a_run_leaves_an_adapter(job, verb):
    command, folder = trained(job, verb, "--lora_rank", "4")
    extra = {"rewards.json"} if verb == "rm" else set()
    names = {path.name for path in folder.iterdir()} - {"README.md"}
    assert names == LEFT | extra | {"adapter_model.safetensors", "adapter_config.json"}
    batch = command.batches[0]
    ids = batch.sequence(0)
    if verb == "rm":
        base = AutoModelForSequenceClassification.from_pretrained(command.folder / "model", num_labels=1)
        base.config.pad_token_id = 0
        model = PeftModel.from_pretrained(base, folder)
        with scoring(command.run.model):
            ours = command.run.model(batch).scores_S
        theirs = scores_of(model, command)
    else:
        base = AutoModelForCausalLM.from_pretrained(command.folder / "model")
        model = PeftModel.from_pretrained(base, folder).eval()
        with scoring(command.run.model):
            ours = command.run.model.inner.lm_head(command.run.model.hidden(batch)[0][: len(ids)])
            theirs = model(input_ids=ids[None]).logits[0]
    assert (ours - theirs).abs().max() < 1e-4


def test_precomputed_reference_log_probs_are_kept_on_disk_for_the_next_run(job, place, monkeypatch):
    monkeypatch.setenv("TRIMTAB_CACHE", str(place / "cache"))
    trained(job, "dpo", "--precompute_ref_log_probs")
    kept = {path: path.stat().st_mtime_ns for path in (place / "cache" / "tokens").glob("reference-*/*")}
    assert kept
    trained(job, "dpo", "--precompute_ref_log_probs", "--ipo")
    again = {path: path.stat().st_mtime_ns for path in (place / "cache" / "tokens").glob("reference-*/*")}
    assert again == kept, "nothing was scored anew"
    trained(job, "dpo", "--precompute_ref_log_probs", "--ref_pretrain", "other")
    assert len(list((place / "cache" / "tokens").glob("reference-*"))) == 2 * len({path.parent for path in kept}), (
        "another reference says something else"
    )
