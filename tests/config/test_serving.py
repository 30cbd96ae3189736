import re

import pytest

from tests.config.every_job import refusal
from trimtab.config.jobs import ServeRMOptions
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, to_yaml

VERIFIER = ["--reward_verifier", "gsm8k"]


def warnings_of(*words: str) -> list[str]:
    return check(parse(ServeRMOptions, words))


def test_every_flag_of_openrlhf_is_taken_and_the_defaults_are_its_own_but_for_the_host():
    words = "--reward_pretrain owner/name --normalize_reward --value_head_prefix head --max_len 99 --port 5001 --bf16"
    words += " --host 127.0.0.1 --load_in_4bit --flash_attn --disable_fast_tokenizer --packing_samples --batch_size 4"
    words += " --attn_implementation sdpa"
    assert warnings_of(*words.split()) == ["--packing_samples has no effect in a server: samples are always packed"]
    options = parse(ServeRMOptions, ["--reward_pretrain", "a/b"])
    assert (options.port, options.max_len, options.value_head_prefix) == (5000, 2048, "score")
    assert options.host == "127.0.0.1" and options.batch_size is None


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "give one of --reward_pretrain .* and --reward_verifier"),
        ("--reward_verifier gsm8k --reward_pretrain a/b", "give one of"),
        ("--reward_pretrain ./nothing", "--reward_pretrain: ./nothing does not exist"),
        ("--reward_pretrain a/b,./nothing", "./nothing does not exist"),
        ("--reward_verifier gsm8k --port 70000", "--port is 70000"),
        ("--reward_verifier gsm8k --batch_size 0", "--batch_size is 0"),
        ("--reward_verifier gsm8k --max_request_mib 0", "--max_request_mib is 0"),
        ("--reward_verifier gsm8k --step_reward mean", "--step_reward is mean"),
        ("--reward_pretrain a/b --placeholder_token .", "needs --reward_tokens too"),
        ("--reward_pretrain a/b,c/d --placeholder_token . --reward_tokens y n", "one process reward model"),
        ("--reward_pretrain a/b --placeholder_token . --reward_tokens y n --normalize_reward", "are probabilities"),
    ],
)
def test_what_cannot_be_served_is_one_line(words, message):
    assert re.search(message, refusal(warnings_of, *words.split()))


def test_a_server_for_everybody_without_a_token_is_warned_about(monkeypatch):
    monkeypatch.delenv("TRIMTAB_BEARER_TOKEN", raising=False)
    assert "give a --bearer_token" in warnings_of(*VERIFIER, "--host", "0.0.0.0")[0]
    assert warnings_of(*VERIFIER, "--host", "0.0.0.0", "--bearer_token", "something") == []
    assert warnings_of(*VERIFIER, "--host", "localhost") == warnings_of(*VERIFIER, "--host", "::1") == []
    monkeypatch.setenv("TRIMTAB_BEARER_TOKEN", "something")
    assert warnings_of(*VERIFIER, "--host", "0.0.0.0") == []


def test_the_token_is_in_no_config():
    options = parse(ServeRMOptions, [*VERIFIER, "--bearer_token", "very-secret"])
    assert "very-secret" not in to_yaml(options) + repr(options)
