"""A reward model scores alike in our packed rows and, from the folder we save, in Hugging Face's own classes."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.tiny import tiny_model
from tests.train.job_run import make_run, preference_rows, write_model, write_rows
from trimtab.cli.main import main
from trimtab.config.jobs import RMOptions
from trimtab.config.parser import parse
from trimtab.config.resolved_config import settle
from trimtab.data.batches import TokenBatch
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import find_device
from trimtab.embedded.sort_task import make_prompts, make_tokenizer
from trimtab.errors import UserError
from trimtab.models.load import load_frozen_reward_model, load_reward_model
from trimtab.models.packed import scoring
from trimtab.models.reward import AutoClassifier, RewardModel, rename_head, separate_padding
from trimtab.models.save import save_model
from trimtab.models.selfcheck import choose_path, probe_batch
from trimtab.train.metrics import read_rows
from trimtab.train.supervised_tasks import RMTask

FAMILIES = ["llama", "qwen2", "mistral", "gpt2", "gemma2", "mixtral", "bloom", "opt"]
WITHOUT_CLASSIFIER = {"granite": "packed", "olmoe": "packed", "mamba": "packed"}  # and how they are run
END = make_tokenizer().eos_token_id
RUN = "--apply_chat_template --train_batch_size 4 --micro_train_batch_size 2 --learning_rate 1e-2 --lr_warmup_ratio 0"


def pairs_sharing_their_prompt() -> TokenBatch:
    """Answers of different lengths, each with the end token."""
    rng = np.random.default_rng(0)
    examples, shared = [], []
    for prompt, answers in ((7, (5, 2)), (3, (1, 9)), (11, (4, 4))):
        asked = rng.integers(5, 46, prompt)
        for borrowed, length in zip((0, prompt), answers):
            ids = np.concatenate([asked, rng.integers(5, 46, length), [END]])
            examples.append((ids, np.arange(len(ids)) >= prompt))
            shared.append(borrowed)
    return TokenBatch.of(examples, shared)


def load(folder, words=""):
    options, _ = settle(parse(RMOptions, ["--pretrain", str(folder), "--dataset", "none", *words.split()]))
    tokenizer = load_tokenizer(options.pretrain)
    loaded = load_reward_model(options, find_device(), tokenizer)
    return loaded, tokenizer


def widen_head(model: RewardModel) -> None:
    """A fresh head gives scores near zero, which would hide mistakes."""
    with torch.no_grad():
        model.inner.score.weight.mul_(20)


def scores_of(model: RewardModel, batch: TokenBatch) -> torch.Tensor:
    with scoring(model):
        return model(batch).scores_S


def alone(model, batch: TokenBatch) -> torch.Tensor:
    """Each sequence through Hugging Face's class by itself."""
    model.eval()
    with torch.no_grad():
        return torch.stack([model(input_ids=batch.sequence(i)[None]).logits[0, 0] for i in range(len(batch.spans))])


def padded(model, batch: TokenBatch, padding: int) -> torch.Tensor:
    """All sequences at once, padded on the right, as anyone would who got the folder."""
    sequences = [batch.sequence(i) for i in range(len(batch.spans))]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=padding)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
    with torch.no_grad():
        return model.eval()(input_ids=ids, attention_mask=mask).logits[:, 0]


def assert_saved_scores_equal(model: RewardModel, tokenizer, folder) -> None:
    batch = pairs_sharing_their_prompt()
    ours = scores_of(model, batch)
    assert ours.std() > 0.05, "scores that differ"
    save_model(model, tokenizer, folder)
    # Gemma-2 caps its attention, which SDPA leaves out.
    attention = {"attn_implementation": "eager"} if model.config.model_type == "gemma2" else {}
    saved = AutoModelForSequenceClassification.from_pretrained(folder, **attention)
    torch.testing.assert_close(ours, alone(saved, batch), atol=1e-5, rtol=1e-5)
    padding = AutoTokenizer.from_pretrained(folder).pad_token_id
    torch.testing.assert_close(ours, padded(saved, batch, padding), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_scores_equal_those_of_the_saved_classifier(tmp_path, family):
    write_model(tmp_path / "model", family)
    loaded, tokenizer = load(tmp_path / "model")
    assert loaded.verdict.path == ("padded" if family == "bloom" else "packed"), loaded.verdict
    widen_head(loaded.model)
    assert_saved_scores_equal(loaded.model, tokenizer, tmp_path / "saved")


@pytest.mark.parametrize("pad_token", ["<eos>", None])
def test_padding_becomes_a_token_that_does_not_end_answers(tmp_path, pad_token):
    write_model(tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.pad_token = pad_token
    tokenizer.save_pretrained(tmp_path / "model")
    loaded, tokenizer = load(tmp_path / "model")
    assert tokenizer.pad_token == "<unk>"
    widen_head(loaded.model)
    assert_saved_scores_equal(loaded.model, tokenizer, tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token == "<unk>"


def test_a_tokenizer_with_nothing_to_pad_with_is_refused_in_one_line():
    core = Tokenizer(tokenizer_models.WordLevel({"<eos>": 0, "a": 1}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")
    with pytest.raises(UserError, match="no special token besides the end token to pad with"):
        separate_padding(tiny_model(), tokenizer)


def test_a_padding_token_in_the_self_checks_samples_does_not_mislead_it(tmp_path):
    write_model(tmp_path / "model", pad_token_id=None)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    ends = {int(probe_batch(model.config, torch.device("cpu"), (9, 6)).sequence(i)[-1]) for i in (0, 1)}
    for padding in ends:
        model.config.pad_token_id = padding
        assert choose_path(RewardModel(model)).path == "packed"


def test_a_classifier_we_cannot_take_apart_scores_at_the_last_token_too(tmp_path, monkeypatch):
    write_model(tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.pad_token = "<unk>"  # an id that is not zero
    tokenizer.save_pretrained(tmp_path / "model")
    plain = LlamaForSequenceClassification.forward

    def doubled(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        out.logits = out.logits * 2
        return out

    monkeypatch.setattr(LlamaForSequenceClassification, "forward", doubled)
    monkeypatch.setattr("trimtab.models.load.initialise_head", lambda model: None)  # a wide head
    loaded, _ = load(tmp_path / "model")
    assert loaded.verdict.path == "logits"
    batch = pairs_sharing_their_prompt()
    scores = scores_of(loaded.model, batch)
    torch.testing.assert_close(scores, alone(loaded.model.inner, batch), atol=1e-5, rtol=1e-5)


def test_a_fresh_head_starts_small_and_a_trained_one_is_kept(tmp_path):
    write_model(tmp_path / "model", hidden_size=128)
    first, tokenizer = load(tmp_path / "model")
    assert first.model.inner.score.weight.std().item() == pytest.approx(1 / 129, rel=0.3)
    save_model(first.model, tokenizer, tmp_path / "saved")
    again, _ = load(tmp_path / "saved")
    assert torch.equal(again.model.inner.score.weight, first.model.inner.score.weight)


# ---- families that transformers has no classifier for


def by_hand(folder, batch: TokenBatch) -> torch.Tensor:
    """Transformers' backbone of a saved model, its last hidden state, and the head's weight from the file."""
    backbone = AutoModel.from_pretrained(folder).eval()
    head = load_file(folder / "model.safetensors")["score.weight"][0]
    sequences = [batch.sequence(i) for i in range(len(batch.spans))]
    with torch.no_grad():
        return torch.stack([backbone(input_ids=s[None]).last_hidden_state[0, -1] @ head for s in sequences])


@pytest.mark.parametrize("family", WITHOUT_CLASSIFIER)
def test_a_family_without_a_classifier_is_scored_by_its_backbone_and_a_head(tmp_path, family):
    write_model(tmp_path / "model", family)
    loaded, tokenizer = load(tmp_path / "model")
    assert loaded.verdict.path == WITHOUT_CLASSIFIER[family], loaded.verdict
    assert loaded.model.inner.score.weight.std().item() == pytest.approx(1 / 33, rel=0.5)
    widen_head(loaded.model)
    save_model(loaded.model, tokenizer, tmp_path / "saved")
    batch = pairs_sharing_their_prompt()
    expected = by_hand(tmp_path / "saved", batch)
    assert expected.std() > 0.05, "scores that differ"
    torch.testing.assert_close(scores_of(loaded.model, batch), expected, atol=1e-5, rtol=1e-5)
    for again in (load(tmp_path / "saved")[0], frozen(tmp_path / "saved", tokenizer)):
        assert torch.equal(scores_of(again.model, batch), scores_of(loaded.model, batch))
    saved = AutoClassifier.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(alone(saved, batch), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded(saved, batch, tokenizer.pad_token_id), expected, atol=1e-5, rtol=1e-5)


def frozen(folder, tokenizer):
    return load_frozen_reward_model(str(folder), RMOptions(), find_device(), tokenizer)


def test_the_folder_of_such_a_model_says_whose_head_it_is(tmp_path):
    """When transformers gets a class of this name, it finds its weights; until then it says that it has none."""
    write_model(tmp_path / "model", "granite")
    loaded, tokenizer = load(tmp_path / "model")
    save_model(loaded.model, tokenizer, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["GraniteForSequenceClassification"] and config["score_head"] == "trimtab"
    assert not list((tmp_path / "saved").glob("*.py"))
    before, after = (tensor_names(tmp_path / name / "model.safetensors") for name in ("model", "saved"))
    assert after - before == {"score.weight"} and before - after <= {"lm_head.weight"}
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")


def test_where_transformers_has_a_classifier_it_is_taken(tmp_path):
    write_model(tmp_path / "model")
    loaded, tokenizer = load(tmp_path / "model")
    assert type(loaded.model.inner) is LlamaForSequenceClassification
    save_model(loaded.model, tokenizer, tmp_path / "saved")
    assert "score_head" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_a_folder_without_its_head_is_refused_in_one_line(tmp_path):
    write_model(tmp_path / "model", "granite")
    loaded, tokenizer = load(tmp_path / "model")
    save_model(loaded.model, tokenizer, tmp_path / "saved")
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    for name, expected in (
        ("score.weight", "a model without a trained score head; make one of it with trimtab rm$"),
        ("model.norm.weight", "1 weights of this model are not in its files, such as model.norm.weight"),
    ):
        left = {key: tensor for key, tensor in weights.items() if key != name}
        save_file(left, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=rf"^--reward_pretrain {tmp_path}/saved: {expected}"):
            frozen(tmp_path / "saved", tokenizer)


def test_a_causal_lm_that_no_head_fits_on_is_refused_in_one_line(tmp_path):
    from transformers import BertConfig, BertLMHeadModel, Emu3Config

    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    BertLMHeadModel(BertConfig(vocab_size=50, is_decoder=True, **small)).save_pretrained(tmp_path / "bert")
    Emu3Config().save_pretrained(tmp_path / "emu3")
    save_file({"unused": torch.zeros(1)}, tmp_path / "emu3" / "model.safetensors", metadata={"format": "pt"})
    for family, expected in (
        ("bert", "BertForSequenceClassification is not a decoder with a score head"),
        ("emu3", "a score head cannot be put on Emu3ForCausalLM; use another model"),
    ):
        make_tokenizer().save_pretrained(tmp_path / family)
        with pytest.raises(UserError, match=rf"^--pretrain {tmp_path}/{family}: {expected}$"):
            load(tmp_path / family)


# ---- after a run


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", preference_rows(8))
    return tmp_path


def tensor_names(path) -> set[str]:
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def test_a_run_leaves_the_mean_and_spread_of_its_evaluation_rewards_in_the_config(folder):
    write_rows(folder / "held_out.jsonl", preference_rows(5, seed=2))
    run = make_run(RMOptions, RMTask, folder, f"{RUN} --eval_dataset {folder}/held_out.jsonl --eval_split train")
    run.train()
    saved = AutoModelForSequenceClassification.from_pretrained(folder / "out")
    tokenizer = make_tokenizer()
    scores = []
    for row in preference_rows(5, seed=2):
        for side in ("chosen", "rejected"):
            text = f"<user>{row['prompt'][0]['content']}<assistant>{row[side][0]['content']}<eos>"
            with torch.no_grad():
                scores.append(saved(input_ids=torch.tensor([tokenizer.encode(text)])).logits.item())
    mean = sum(scores) / 10
    std = (sum((s - mean) ** 2 for s in scores) / 9) ** 0.5
    config = json.loads((folder / "out" / "config.json").read_text())
    assert config["mean"] == pytest.approx(mean, abs=1e-5) and config["std"] == pytest.approx(std, abs=1e-5)
    facts = json.loads((folder / "out" / "rewards.json").read_text())
    assert facts["source"] == "evaluation" and (facts["mean"], facts["std"]) == (config["mean"], config["std"])
    found = sorted(score for pair in facts["chosen_rejected"] for score in pair)
    assert found == pytest.approx(sorted(scores), abs=1e-5)


def test_a_head_of_another_name_comes_back(folder):
    run = make_run(RMOptions, RMTask, folder, f"{RUN} --value_head_prefix value_head")
    run.train()
    names = tensor_names(folder / "out" / "model.safetensors")
    assert "value_head.weight" in names and not any(name.startswith("score") for name in names)
    batch = pairs_sharing_their_prompt()
    expected = scores_of(run.model, batch)
    for words in ("", "--value_head_prefix value_head"):  # the folder knows its own name
        again, _ = load(folder / "out", words)
        torch.testing.assert_close(scores_of(again.model, batch), expected, atol=1e-6, rtol=0)


def test_the_head_is_renamed_in_the_index_of_several_files_too(tmp_path):
    model = AutoModelForSequenceClassification.from_config(tiny_model().config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    rename_head(tmp_path, "score", "value_head")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in tensor_names(tmp_path / file)
    assert "value_head.weight" in index["weight_map"]


def test_an_adapter_folder_loads_with_peft_on_the_base_and_gives_the_same_scores(folder):
    run = make_run(RMOptions, RMTask, folder, f"{RUN} --lora_rank 4 --max_epochs 2")
    run.train()
    names = tensor_names(folder / "out" / "adapter_model.safetensors")
    assert any("score" in name for name in names), "the head is trained in full"
    base = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    batch = pairs_sharing_their_prompt()
    plain = alone(base, batch)
    adapted = alone(PeftModel.from_pretrained(base, folder / "out"), batch)
    torch.testing.assert_close(scores_of(run.model, batch), adapted, atol=1e-5, rtol=1e-5)
    assert (adapted - plain).abs().max() > 0.01
    facts = json.loads((folder / "out" / "rewards.json").read_text())
    assert facts["source"] == "training" and facts["std"] > 0


def test_a_run_with_a_head_that_transformers_has_no_class_for_gives_a_reward_and_a_critic(tmp_path):
    """PPO's critic starts as the reward model; without it, as the policy with a new head."""
    write_model(tmp_path / "model", "granite")
    write_rows(tmp_path / "train.jsonl", preference_rows(8))
    write_rows(tmp_path / "prompts.jsonl", make_prompts(4, 1))
    run = make_run(RMOptions, RMTask, tmp_path, RUN)
    run.train()
    fixed = f"ppo --pretrain {tmp_path}/model --prompt_data {tmp_path}/prompts.jsonl --apply_chat_template"
    sizes = "--max_steps 1 --prompt_max_len 40 --generate_max_len 6 --rollout_batch_size 4 --train_batch_size 4"
    rewards = {"scored": f"--reward_pretrain {tmp_path}/out", "verified": "--reward_verifier length(0-4)"}
    for name, reward in rewards.items():
        assert main(f"{fixed} {sizes} {reward} --save_path {tmp_path}/{name}".split()) == 0
        assert read_rows(tmp_path / name / "metrics.jsonl")[-1]["critic_loss"] > 0
