"""The judge's questions, scores, retries and cache, against a server that counts digits."""

import json
import threading
import time

import pytest

from tests.rewards.judging import completion, digits, judging, score_digits
from tests.rewards.samples import make_reward_request
from tests.server import running as serving
from trimtab.config.jobs import GenerateOptions
from trimtab.errors import UserError
from trimtab.rewards.judge import JudgeReward, ReplyCache
from trimtab.rewards.types import RewardFailed

ANSWERS = ["12 and 3", "none", "7", "12 and 3"]


def judge_of(url: str, cache=None, **options) -> JudgeReward:
    found = GenerateOptions(pretrain="m", dataset="d", judge=url, **{"judge_retries": 1, **options})
    for group in type(found).__mro__:
        if "check" in vars(group) and group.__name__ == "JudgeOptions":
            list(group.check(found))
    return JudgeReward(found, url.split(","), cache=cache, pause=0.01, timeout=10)


def asked(url: str, request, cache=None, **options):
    judge = judge_of(url, cache, **options)
    try:
        return judge(request)
    finally:
        judge.close()


def test_the_score_is_scaled_and_equal_questions_are_asked_once():
    prompts = ["p", "p", "p", "p"]
    with judging() as judge:
        result = asked(judge.url, make_reward_request(ANSWERS, prompts=prompts))
    assert result.rewards == [digits(answer) / 10 for answer in ANSWERS]
    assert result.logs["prompt_tokens"] == [7.0] * 4 and result.logs["completion_tokens"] == [3.0] * 4
    assert all(seconds > 0 for seconds in result.logs["seconds"]) and len(judge.asked) == 3 and not result.failed


def test_a_template_is_filled_in_at_once(tmp_path):
    file = tmp_path / "template"
    file.write_text('{"judge": {label}} {prompt}|{response}|{rubric}|{other}')
    (tmp_path / "rubric").write_text("be brief\n")
    request = make_reward_request(["{label} {prompt}"], ["secret"], ["what?"])
    with judging(lambda _: (200, completion("Score: 5"))) as judge:
        options = {"judge_template": str(file), "judge_rubric": str(tmp_path / "rubric")}
        assert asked(judge.url, request, **options).rewards == [0.5]
    assert judge.asked == ['{"judge": secret} what?|{label} {prompt}|be brief|{other}']


@pytest.mark.parametrize(
    "reply, options, reward",
    [
        ("Score: 3, no: score = 4", {}, 0.4),
        ("**Score:** 2.5", {}, 0.25),
        ("Score: -1", {"judge_range": (-1.0, 1.0)}, 0.0),
        ("score=-.5 and Score: \u22120.5", {"judge_range": (-1.0, 1.0)}, 0.25),
        ("Score - 7", {}, 0.7),
        ("Score: .5", {}, 0.05),
        ("**Score** (0-10): 7", {}, 0.7),
        ("Score (7)", {}, 0.7),
        ("[[2]] or rather [[-1]]", {"judge_pattern": r"\[\[(-?\d)\]\]", "judge_range": (-2.0, 2.0)}, 0.25),
        ("yes 7", {"judge_pattern": r"\d"}, 0.7),
    ],
)
def test_the_last_match_is_the_score(reply, options, reward):
    with judging(lambda _: (200, completion(reply))) as judge:
        assert asked(judge.url, make_reward_request(["x"]), **options).rewards == [reward]


@pytest.mark.parametrize(
    "answer, words, times",
    [
        ((200, completion("Score: 11")), "no score from 0 to 10", 2),
        ((200, completion("Score: -3")), "-3 is not in --judge_range", 2),
        ((200, completion("I cannot say")), "no score from 0 to 10 in the reply that ends 'I cannot say'", 2),
        ((200, b"<html>"), "not JSON", 2),
        ((200, {"error": "?"}), "no chat completion", 2),
        ((503, {"error": "busy"}), "HTTP status 503", 2),
        ((400, {"error": "too long"}), "HTTP status 400", 1),
    ],
)
def test_a_failure_is_of_its_sample_alone(answer, words, times):
    def answer_or_fail(response):
        return answer if response == "bad" else score_digits(response)

    with judging(answer_or_fail) as judge:
        result = asked(judge.url, make_reward_request(["1", "bad", "22"]))
        assert list(result.failed) == [1] and words in result.failed[1] and judge.url in result.failed[1]
        assert [result.rewards[0], result.rewards[2]] == [0.1, 0.2] and len(judge.asked) == 2 + times
        with pytest.raises(RewardFailed, match="no reward for row 1"):
            asked(judge.url, make_reward_request(["1", "bad", "22"]), max_failed_rewards=0.0)


def test_a_failure_passes_if_a_retry_succeeds():
    replies = iter([(500, {}), (200, b"{"), (200, completion("Score: 10"))])
    with judging(lambda _: next(replies)) as judge:
        assert asked(judge.url, make_reward_request(["x"]), judge_retries=2).rewards == [1.0]


def test_a_server_that_is_gone_is_asked_once_a_sample_and_often_again_when_it_is_back():
    """The pauses of every sample would be hours, of an iteration."""
    dead = [True]
    with judging(lambda _: (500, {}) if dead else (200, completion("Score: 10"))) as judge:
        found = judge_of(judge.url, judge_concurrency=1, judge_retries=2)
        assert len(found(make_reward_request([str(i) for i in range(6)])).failed) == 6
        assert len(judge.asked) == 4 * 3 + 2
        dead.clear()
        assert found(make_reward_request(["x"])).rewards == [1.0]
        dead.append(True)
        assert len(found(make_reward_request(["y"])).failed) == 1
        found.close()
    assert len(judge.asked) == 4 * 3 + 2 + 1 + 3


def test_a_server_says_when_it_will_answer():
    replies = iter([(429, {}), (200, completion("Score: 10"))])
    with judging(lambda _: next(replies), headers=[("Retry-After", "1")]) as judge:
        began = time.monotonic()
        assert asked(judge.url, make_reward_request(["x"])).rewards == [1.0]
    assert time.monotonic() - began > 0.9


def test_the_default_retries_outlast_a_limit_of_requests_a_minute():
    with judging() as judge:
        found = JudgeReward(GenerateOptions(pretrain="m", dataset="d", judge=judge.url), [judge.url])
        found.close()
    assert sum(map(found._pause, range(1, found.attempts))) > 60


@pytest.mark.parametrize("params, times", [("{}", 2), ('{"temperature": 0.5}', 5)])
def test_a_reply_without_a_score_is_asked_for_once_more_at_temperature_0(params, times):
    with judging(lambda _: (200, completion("I cannot say"))) as judge:
        asked(judge.url, make_reward_request(["x"]), judge_retries=4, judge_params=params)
        assert len(judge.asked) == times


def test_a_key_is_sent_and_one_that_is_refused_ends_the_run(monkeypatch):
    monkeypatch.setenv("MY_KEY", "hush")
    with judging() as judge:
        asked(judge.url, make_reward_request(["1"]), judge_key_variable="MY_KEY")
        assert set(judge.headers) == {"Bearer hush"}
    with judging(lambda _: (401, {"error": "who?"})) as judge, pytest.raises(RewardFailed, match="401"):
        asked(judge.url, make_reward_request(["1"]))  # though the judge may fail now and then


def test_requests_are_concurrent_within_their_limit():
    now = highest = 0
    lock = threading.Lock()

    def answer(response):
        nonlocal now, highest
        with lock:
            now += 1
            highest = max(highest, now)
        time.sleep(0.05)
        with lock:
            now -= 1
        return score_digits(response)

    with judging(answer) as judge:
        asked(judge.url, make_reward_request([str(10**i) for i in range(9)]), judge_concurrency=3)
    assert highest == 3


@pytest.mark.parametrize("models", [(404, {"detail": "?"}), (200, b"no JSON"), (200, {"data": []})])
def test_a_server_without_a_list_of_models_needs_a_name(models):
    with judging(models=models) as judge:
        with pytest.raises(UserError, match=r"lists no models.*--judge_model"):
            judge_of(judge.url)
        assert asked(judge.url, make_reward_request(["1"]), judge_model="named").rewards == [0.1]


def test_wrong_addresses_and_keys_are_known_at_the_start():
    with pytest.raises(UserError, match=r"--judge http://127.0.0.1:1/v1: no answer .*refused"):
        judge_of("http://127.0.0.1:1")
    with judging(models=(401, {})) as judge, pytest.raises(UserError, match=r"401.*--judge_key_variable"):
        judge_of(judge.url)
    with pytest.raises(UserError, match="--judge ftp://x/v1: give an address"):
        judge_of("ftp://x")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"judge_template": "bare"}, "bare: it has no {response}"),
        ({"judge_template": "nowhere"}, "nowhere: cannot be read"),
        ({"judge_template": "whole", "judge_rubric": "bare"}, "has no {rubric}"),
        ({"judge_pattern": "("}, "not a regular expression"),
        ({"judge_params": '{"model": "x"}'}, "--judge_params: model is what --judge_model says"),
        ({"judge_range": (3.0, 3.0)}, "the first must be below"),
        ({"judge_params": "[1]"}, "give a JSON object"),
        ({"judge_key_variable": "NO_SUCH_VARIABLE"}, "is not set"),
    ],
)
def test_wrong_options(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").write_text("Score this: {prompt}")
    (tmp_path / "whole").write_text("Score this: {response}")
    with pytest.raises(UserError) as error:
        judge_of("http://127.0.0.1:1", **options)
    assert words in str(error.value)


def test_fields_of_a_template_that_are_not_filled_in_are_named(tmp_path):
    (tmp_path / "template").write_text('{"judge": {response}} {answr}')
    found = GenerateOptions(pretrain="m", dataset="d", judge="http://x", judge_template=str(tmp_path / "template"))
    lines = [line for group in type(found).__mro__ if group.__name__ == "JudgeOptions" for line in group.check(found)]
    assert lines == [
        "--judge_template: {answr} is sent as it stands; what is filled in is {prompt}, {response}, {label}, {rubric}"
    ]


def test_a_pattern_without_a_group_and_a_key_that_is_refused_later_say_what_to_do():
    with judging(lambda _: (200, completion("Score: 7"))) as judge:
        failed = asked(judge.url, make_reward_request(["x"]), judge_pattern="Score: [0-9]").failed[0]
        assert "'Score: 7' is no number: --judge_pattern needs a group (...) around it" in failed
    with (
        judging(lambda _: (401, {})) as judge,
        pytest.raises(RewardFailed, match=r"HTTP status 401.*judge_key_variable"),
    ):
        asked(judge.url, make_reward_request(["x"]))


def test_fields_of_the_request():
    bodies = []
    with judging() as judge:
        found = judge_of(judge.url, judge_params='{"max_tokens": null, "top_p": 0.5}')
        bodies.append(found._body)
        found.close()
    assert bodies == [{"model": "tiny-judge", "temperature": 0, "top_p": 0.5}]


# ---- the cache


def test_a_second_run_asks_nothing_again_and_tolerates_torn_lines(tmp_path):
    file, request = tmp_path / "kept" / "judge.jsonl", make_reward_request(ANSWERS)
    with judging() as judge:
        first = asked(judge.url, request, file)
        count = len(judge.asked)
        with file.open("ab") as torn:
            torn.write(b'{"key": "torn", "text": "Sco')
        assert asked(judge.url, request, file) == first and len(judge.asked) == count
        assert asked(judge.url, make_reward_request(["99"]), file).rewards == [0.2]
        assert asked(judge.url, make_reward_request(["99"]), file).rewards == [0.2]
        assert len(judge.asked) == count + 1  # what came after the torn line is known too
        asked(judge.url, request, file, judge_pattern="(?i)IT has (no|some)", judge_params="{}", judge_retries=0)
        assert len(judge.asked) == count + 1 + 4  # a pattern that finds nothing in kept replies


def test_known_replies_reach_the_new_file_when_the_folder_is_set_aside(tmp_path):
    file = tmp_path / "run" / "judge.jsonl"
    ReplyCache(file).put("a", {"text": "Score: 1"})
    cache = ReplyCache(file)
    file.parent.rename(tmp_path / "aside")
    cache.put("b", {"text": "Score: 2"})
    assert [ReplyCache(file).get(key) for key in "ab"] == [{"text": "Score: 1"}, {"text": "Score: 2"}]
    assert len(file.read_text().splitlines()) == 2


def test_failures_are_remembered_by_a_killed_run_and_forgotten_after_an_orderly_end(tmp_path):
    file = tmp_path / "judge.jsonl"
    cache = ReplyCache(file)
    cache.put("a", {"failed": "busy"})
    cache.put("b", {"text": "Score: 1"})
    assert ReplyCache(file).get("a") == {"failed": "busy"}  # killed: nothing else was written
    cache.end()
    assert ReplyCache(file).get("a") is None and ReplyCache(file).get("b") == {"text": "Score: 1"}
    assert all(json.loads(line) for line in file.read_text().splitlines())


# ---- our own server


def test_our_own_server_judges():
    """A question ends with `to 10 (best).`; the engine answers with the number of 7s in the response."""

    def answer(question: str) -> str:
        return f"Score: {question.count('7')}<|im_end|>"

    with serving.running(serving.Scripted(answer)) as server:
        result = asked(server.url, make_reward_request(["7 7 7", "1"], prompts=["a", "b"]))
    assert result.rewards == [0.3, 0.0]
    assert min(result.logs["prompt_tokens"]) > 100 and min(result.logs["completion_tokens"]) > 1
