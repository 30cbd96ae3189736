"""What the command serves: models, process reward models and verifiers, from its options."""

import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from tests.rewards.running import running
from tests.rewards.samples import make_reward_request
from tests.tiny import tiny_model
from tests.train.job_run import write_model
from trimtab.config.jobs import ServeRMOptions
from trimtab.config.parser import parse
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.server.reward_server import served_reward

QUERIES = ["<user>sort 4931><assistant>1349", "<user>sort 52><assistant>25"]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("reward"), make_tokenizer()
    config = tiny_model("llama", vocab_size=len(tokenizer)).config
    config.num_labels, config.pad_token_id, config.mean, config.std = 1, tokenizer.pad_token_id, 1.0, 4.0
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def served(*words: str) -> list[float]:
    """The rewards of the two queries over HTTP."""
    reward = served_reward(parse(ServeRMOptions, words))
    with running(reward, max_samples=1) as server:
        reply = httpx.post(server.url + "/get_reward", json={"query": QUERIES})
    reward.close()
    return reply.json()["rewards"]


def test_a_reward_model_is_served_with_hugging_faces_scores(reward_model):
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(reward_model).eval(), make_tokenizer()
    with torch.no_grad():
        ids = [tokenizer(query + "<eos>", return_tensors="pt").input_ids for query in QUERIES]
        scores = [model(input_ids=one).logits[0, 0].item() for one in ids]
    assert served("--reward_pretrain", str(reward_model)) == pytest.approx(scores, abs=1e-5)
    normal = served("--reward_pretrain", str(reward_model), "--normalize_reward", "--batch_size", "1")
    assert normal == pytest.approx([(score - 1) / 4 for score in scores], abs=1e-5)
    twice = served("--reward_pretrain", f"{reward_model},{reward_model}")
    assert twice == pytest.approx([2 * score for score in scores], abs=1e-5)


def test_a_process_reward_model_is_served_by_its_worst_or_last_step(tmp_path):
    write_model(tmp_path, seed=3)
    words = ["--reward_pretrain", str(tmp_path), "--placeholder_token", ".", "--reward_tokens", "y", "n"]
    reward = served_reward(parse(ServeRMOptions, [*words, "--step_separator", " "]))
    result = reward(make_reward_request(["1 2 3"], prompts=["sort"]))
    assert result.rewards == result.logs["worst_step"] and result.logs["steps"] == [3.0]
    last = served_reward(parse(ServeRMOptions, [*words, "--step_reward", "last", "--step_separator", " "]))
    assert last(make_reward_request(["1 2 3"], prompts=["sort"])).rewards == result.logs["last_step"]


def test_a_verifier_is_served():
    assert served("--reward_verifier", "regex(25$):2,length(99):0.5") == [0.5, 2.5]


def test_mistakes_are_one_line_and_exit_code_2(trimtab):
    assert trimtab("serve-rm").mistake.startswith("give one of --reward_pretrain")
    assert "there is no verifier gsm9k" in trimtab("serve-rm --reward_verifier gsm9k").mistake
    elsewhere = trimtab("serve-rm --reward_verifier gsm8k --host 203.0.113.1")
    assert elsewhere.code == 2 and "cannot listen there" in elsewhere.err.splitlines()[-1]


def test_a_dry_run_serves_nothing_and_prints_the_config(trimtab):
    assert "reward_verifier: gsm8k" in trimtab("serve-rm --reward_verifier gsm8k --dry_run").said
