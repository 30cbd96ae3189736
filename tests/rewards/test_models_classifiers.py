"""Classifiers of question and answer give what Hugging Face's pipeline of tokenizer and model gives."""

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
)

from tests.rewards.encoder import write_encoder
from tests.tiny import tiny_model
from trimtab.config.jobs import AttackOptions
from trimtab.config.rl_jobs import TailOptions
from trimtab.distributed.device import find_device
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.rewards.build import build_reward
from trimtab.rewards.models import ClassifierReward, ModelReward, input_format, kept_tokens, load_classifier_reward
from trimtab.rewards.types import RewardRequest

QUESTIONS = ["sort 4931>", "hello?", "a long question with many words, all of them here."]
ANSWERS = ["1349", "hi there", "no"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    write_encoder(folder)
    return str(folder)


def request(questions=QUESTIONS, answers=ANSWERS, ended="") -> RewardRequest:
    prompts = [f"<user>{question}<assistant>" for question in questions]
    responses = [answer + ended for answer in answers]
    queries = [prompt + response for prompt, response in zip(prompts, responses)]
    return RewardRequest(queries, prompts, responses, [None] * len(prompts), {"question": list(questions)})


def scores(folder, inputs) -> list[float]:
    """Each sample alone through Hugging Face's classes; `inputs` are what the tokenizer is called with."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), tokenizer_of(folder)
    with torch.no_grad():
        return [model(**tokenizer(*texts, return_tensors="pt")).logits[0, 0].item() for texts in inputs]


def tokenizer_of(folder):
    return AutoTokenizer.from_pretrained(folder)


def judge(folder, **changes):
    return load_classifier_reward(folder, AttackOptions(**changes), find_device(), policy_tokenizer=make_tokenizer())


def test_a_pair_is_read_as_two_inputs_without_template_and_end(folder):
    found = judge(folder)
    assert type(found) is ClassifierReward and found.reads == "pair"
    rewards = found(request(ended="<eos>")).rewards
    assert rewards == pytest.approx(scores(folder, zip(QUESTIONS, ANSWERS)), abs=1e-5)
    assert len({round(reward, 4) for reward in rewards}) == 3


def test_a_text_is_question_and_answer_joined(folder):
    rewards = judge(folder, reward_input="text")(request()).rewards
    assert rewards == pytest.approx(scores(folder, ([q + a] for q, a in zip(QUESTIONS, ANSWERS))), abs=1e-5)


@pytest.mark.parametrize("reads, marks", [("pair", 3), ("text", 2)])
def test_the_question_is_shortened_and_the_answer_kept(folder, reads, marks):
    question, answer, limit = QUESTIONS[2], "an answer", 20
    rewards = judge(folder, reward_input=reads, rm_max_len=limit)(request([question], [answer])).rewards
    shorter = question[-(limit - marks - len(answer)) :]
    inputs = (shorter, answer) if reads == "pair" else (shorter + answer,)
    assert rewards == pytest.approx(scores(folder, [inputs]), abs=1e-5)


def test_the_limit_of_the_model_holds_where_the_option_is_larger(folder):
    found = judge(folder)
    assert found.limit == 80
    assert len(found.sequences(request(["q" * 200], ["a" * 30]))[0]["input_ids"]) == 80


def test_an_answer_that_alone_is_too_long_loses_its_end():
    owners = [None, 0, 0, None, 1, 1, 1, None]
    assert kept_tokens(owners, 8) == [*range(8)]
    assert kept_tokens(owners, 7) == [0, 2, 3, 4, 5, 6, 7]
    assert kept_tokens(owners, 5) == [0, 3, 4, 5, 7]


def test_passes_of_any_size_give_the_same_rewards(folder):
    alone = ClassifierReward(folder, AttackOptions(), find_device(), reads="pair", max_samples=1)(request()).rewards
    assert judge(folder)(request()).rewards == pytest.approx(alone, abs=1e-5)


def test_conversations_and_missing_columns_are_read_too(folder):
    found = judge(folder)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked = RewardRequest(["x"], ["p"], ["c"], [None], {"question": [turns]})
    plain = RewardRequest(["x"], ["p"], ["c"], [None])
    expected = scores(folder, [("a\nb", "c"), ("p", "c")])
    assert [*found(asked).rewards, *found(plain).rewards] == pytest.approx(expected, abs=1e-5)


def test_a_decoder_reads_its_own_chat_template_and_known_names_keep_their_kind(folder, tmp_path):
    tokenizer = make_tokenizer()
    config = tiny_model("llama", vocab_size=len(tokenizer), pad_token_id=0).config
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert input_format(str(tmp_path), None) == "chat" and input_format(str(tmp_path), "text") == "text"
    assert input_format("nicholasKluge/ToxicityModel", None) == "text"
    assert type(judge(str(tmp_path))) is ModelReward


def test_bf16_of_the_policy_does_not_round_its_judge(folder):
    assert judge(folder, bf16=True)(request()).rewards == judge(folder)(request()).rewards


def test_a_tail_run_has_its_answers_read_as_its_options_say(folder):
    options = TailOptions(reward_pretrain=folder, reward_input="pair", apply_chat_template=True, input_key="question")
    rewards = build_reward(options, find_device(), make_tokenizer())(request()).rewards
    assert rewards == pytest.approx(scores(folder, zip(QUESTIONS, ANSWERS)), abs=1e-5)
