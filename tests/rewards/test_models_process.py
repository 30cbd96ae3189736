"""Step scores are those of the model's own logits at the placeholders, and stand on the tokens that end the steps."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.rewards.samples import make_reward_request
from tests.train.job_run import write_model
from trimtab.config.objective_options import StepRewardOptions
from trimtab.config.training_options import LoadOptions
from trimtab.distributed.device import find_device
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.errors import UserError
from trimtab.rewards.models import ProcessReward, split_steps
from trimtab.rewards.types import BadSample, RewardRequest

TOKENIZER = make_tokenizer()
PROMPTS = ["<user>sort 4931><assistant>", "<user>sort 52><assistant>"]
RESPONSES = ["1.3.9.4.<eos>", "25<eos>"]


class Options(LoadOptions, StepRewardOptions):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    write_model(folder, seed=3)
    return folder


def make(folder, **how) -> ProcessReward:
    options = Options(placeholder_token=".", reward_tokens=("y", "n"))
    return ProcessReward(str(folder), options, find_device(), policy_tokenizer=TOKENIZER, **how)


def sample_request(responses=tuple(RESPONSES)) -> RewardRequest:
    ids = [TOKENIZER(list(texts), add_special_tokens=False)["input_ids"] for texts in (PROMPTS, responses)]
    queries = [prompt + response for prompt, response in zip(PROMPTS, responses)]
    return RewardRequest(queries, PROMPTS, list(responses), [None] * 2, {}, *ids)


def expected(folder, text: str) -> list[float]:
    """As docs/process_reward.md shows it."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = TOKENIZER(text, return_tensors="pt", add_special_tokens=False).input_ids
    good, bad, end = TOKENIZER.convert_tokens_to_ids(["y", "n", "."])
    with torch.no_grad():
        logits = model(ids).logits[0][ids[0] == end]
    return logits[:, [good, bad]].softmax(-1)[:, 0].tolist()


def test_outcomes_are_the_worst_and_the_last_step(folder):
    first, second = expected(folder, PROMPTS[0] + "1.3.9.4."), expected(folder, PROMPTS[1] + "25.")
    assert len(first) == 4 and first[-1] != min(first)
    worst, last = (make(folder, place=place)(sample_request()) for place in ("min", "last"))
    assert worst.rewards == pytest.approx([min(first), second[0]], abs=1e-5)
    assert last.rewards == pytest.approx([first[-1], second[0]], abs=1e-5)
    assert worst.steps is None and worst.logs["steps"] == [4.0, 1.0]
    assert worst.logs["last_step"] == last.rewards


def test_scores_stand_on_the_last_token_of_each_step(folder):
    result = make(folder, place="steps")(sample_request())
    assert result.rewards == [0.0, 0.0]
    assert [[index for index, _ in steps] for steps in result.steps] == [[1, 3, 5, 7], [1]]
    assert [score for _, score in result.steps[0]] == pytest.approx(expected(folder, PROMPTS[0] + "1.3.9.4."), abs=1e-5)
    assert result.scores == [min(score for _, score in steps) for steps in result.steps]


def test_a_separator_ends_steps_and_the_placeholder_is_put_before_it(folder):
    result = make(folder, place="steps", separator=", ")(sample_request(("13, 49<eos>", "2, 5, <eos>")))
    assert [[index for index, _ in steps] for steps in result.steps] == [[1, 5], [0, 3]]
    for prompt, text, steps in zip(PROMPTS, ["13., 49.", "2., 5."], result.steps):
        assert [score for _, score in steps] == pytest.approx(expected(folder, prompt + text), abs=1e-5)


def test_an_answer_that_is_cut_is_judged_by_the_steps_that_are_left(folder):
    inside = len(TOKENIZER(PROMPTS[0])["input_ids"]) + 4
    result = make(folder, place="last", max_len=inside)(sample_request())
    assert result.rewards[0] == pytest.approx(expected(folder, PROMPTS[0] + "1.3.")[1], abs=1e-5)
    with pytest.raises(BadSample, match="no step of row 0 is within the first 9 tokens"):
        make(folder, max_len=9)(sample_request())


def test_outcomes_need_no_tokens(folder):
    plain = make_reward_request(RESPONSES, prompts=PROMPTS)
    assert make(folder)(plain).rewards == make(folder)(sample_request()).rewards


@pytest.mark.parametrize(
    "text, steps",
    [
        ("a.b.", ["a", "b"]),
        ("a.b", ["a", "b"]),
        ("..a. .b", ["a", "b"]),
        ("", [""]),
        (". .", [". ."]),
    ],
)
def test_steps_lie_between_separators_and_blank_ones_do_not_count(text, steps):
    assert [text[start:end] for start, end in split_steps(text, ".")] == steps


def test_what_is_missing_is_said_in_one_line(folder):
    with pytest.raises(UserError, match="needs --reward_tokens"):
        ProcessReward(str(folder), Options(placeholder_token="."), find_device())
    with pytest.raises(UserError, match="steps, min, last, not mean"):
        make(folder, place="mean")
