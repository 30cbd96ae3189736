"""A reward model gives a sample the score that Hugging Face's own class gives it, however the sample comes."""

import json

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
)

from tests.rewards.encoder import write_encoder
from tests.tiny import tiny_model
from trimtab.config.objective_options import RewardHeadOptions
from trimtab.config.training_options import LoadOptions
from trimtab.distributed.device import find_device
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.errors import UserError
from trimtab.rewards.models import ModelReward
from trimtab.rewards.types import RewardRequest

PROMPTS = ["<user>sort 4931><assistant>", "<user>sort 86420><assistant>", "<user>hello?<assistant>"]
RESPONSES = ["1349", "02468", "hi"]


class Options(LoadOptions, RewardHeadOptions):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reward model of random weights."""
    folder = tmp_path_factory.mktemp("reward")
    tokenizer = make_tokenizer()
    config = tiny_model("llama", vocab_size=len(tokenizer)).config
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.config.mean, model.config.std = 0.5, 2.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def model_reward(folder, **how) -> ModelReward:
    return ModelReward(str(folder), Options(), find_device(), **how)


def sample_request(tokenizer=None, ended=True, **columns) -> RewardRequest:
    end = "<eos>" if ended else ""
    queries = [prompt + response + end for prompt, response in zip(PROMPTS, RESPONSES)]
    ids = {}
    if tokenizer is not None:
        ids["prompt_ids"] = tokenizer(PROMPTS, add_special_tokens=False)["input_ids"]
        ids["response_ids"] = tokenizer([r + end for r in RESPONSES], add_special_tokens=False)["input_ids"]
    return RewardRequest(queries, PROMPTS, [r + end for r in RESPONSES], [None] * 3, columns, **ids)


def expected(folder, texts: list[str], **how) -> list[float]:
    """Each text alone through Hugging Face's class."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt", **how)).logits[0, 0].item() for text in texts]


def whole_texts() -> list[str]:
    return [prompt + response + "<eos>" for prompt, response in zip(PROMPTS, RESPONSES)]


@pytest.mark.parametrize("ended", [True, False])
def test_ids_and_text_of_the_policys_tokenizer_give_hugging_faces_scores(folder, ended):
    reward = model_reward(folder, policy_tokenizer=make_tokenizer(), max_tokens=30)
    assert reward.reads_ids
    from_ids = reward(sample_request(make_tokenizer(), ended)).rewards
    from_text = reward(sample_request(None, ended)).rewards
    assert from_ids == pytest.approx(expected(folder, whole_texts()), abs=1e-5)
    assert from_text == pytest.approx(from_ids, abs=1e-6)
    assert len(set(from_ids)) == 3


def test_ids_are_read_and_not_the_text_beside_them(folder):
    reward = model_reward(folder, policy_tokenizer=make_tokenizer())
    request = sample_request(make_tokenizer())
    other = RewardRequest(["?"] * 3, PROMPTS, ["?"] * 3, [None] * 3, {}, request.prompt_ids, request.response_ids)
    assert reward(other).rewards == reward(request).rewards


def test_another_tokenizer_makes_the_model_render_the_conversation_itself(folder):
    policy = make_tokenizer()
    policy.add_special_tokens({"eos_token": "<end>"})
    reward = model_reward(folder, policy_tokenizer=policy, messages_key="input")
    turns = [[{"role": "user", "content": f"sort {n}>"}] for n in (4931, 86420)] + ["hello?"]
    responses = [response + "<end>" for response in RESPONSES]
    request = RewardRequest(["unreadable"] * 3, PROMPTS, responses, [None] * 3, {"input": turns}, [[1]] * 3, [[2]] * 3)
    assert not reward.reads_ids
    assert reward(request).rewards == pytest.approx(expected(folder, whole_texts()), abs=1e-5)


def test_normalised_rewards_use_the_mean_and_deviation_of_the_config(folder):
    plain = model_reward(folder)(sample_request()).rewards
    normal = model_reward(folder, normalize=True)(sample_request()).rewards
    assert normal == pytest.approx([(reward - 0.5) / 2.0 for reward in plain])


def test_samples_are_cut_at_max_len_and_passes_do_not_change_scores(folder):
    cut = model_reward(folder, max_len=6)(sample_request()).rewards
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = [tokenizer.decode(tokenizer(text)["input_ids"][:6]) for text in whole_texts()]
    assert cut == pytest.approx(expected(folder, first), abs=1e-5)
    one_by_one = model_reward(folder, max_samples=1)(sample_request()).rewards
    assert one_by_one == pytest.approx(expected(folder, whole_texts()), abs=1e-5)


def test_an_encoder_with_one_score_is_a_reward_model_too(tmp_path):
    write_encoder(tmp_path)
    rewards = model_reward(tmp_path)(sample_request(ended=False)).rewards
    texts = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES)]
    assert rewards == pytest.approx(expected(tmp_path, texts), abs=1e-5)
    assert len(set(rewards)) == 3


def test_a_model_without_a_head_and_a_config_without_a_mean_are_refused(folder, tmp_path):
    tokenizer = make_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"--reward_pretrain .*without a trained score head"):
        model_reward(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for name in ("mean", "std"):
        config.pop(name)
    AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no mean and std"):
        model_reward(tmp_path, normalize=True)
