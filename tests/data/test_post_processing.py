import math

import pytest

from trimtab.data.conversion import conditioned, post_process, with_reward

TALK = [{"role": "user", "content": "four?"}]


def scored(*answers, prompt="one?"):
    return [{"input": prompt, "output": output, "reward": reward} for output, reward in answers]


def process(rows, name, reward_template=None, normalize=False):
    return post_process(rows, name, reward_template=reward_template, normalize=normalize)


def test_rejection_sampling_keeps_the_first_best_answer_of_every_prompt():
    rows = scored(("a", 1.0), ("b", 3.0), ("c", 3.0)) + scored(("d", -2.0), prompt=TALK)
    assert process(rows, "rs") == [rows[1], rows[3]]


def test_answers_to_one_prompt_belong_together_wherever_they_stand():
    first, second = scored(("a", 0.0), ("b", 1.0)), scored(("c", 2.0), ("d", 1.0), prompt=TALK)
    mixed = [first[0], second[0], first[1], second[1]]
    assert process(mixed, "rs") == [first[1], second[0]]


def test_a_score_of_zero_is_a_score():
    rows = scored(("a", -1.0), ("b", 0.0))
    assert process(rows, "rs") == [rows[1]]
    assert process(rows, "iter_dpo")[0]["chosen_reward"] == 0.0


def test_iterative_dpo_pairs_the_best_with_the_worst_and_leaves_out_what_says_nothing():
    rows = scored(("a", 1.0), ("b", 3.0), ("c", -1.0)) + scored(("d", 2.0), ("e", 2.0), prompt=TALK)
    assert process(rows, "iter_dpo") == [
        {"prompt": "one?", "chosen": "b", "chosen_reward": 3.0, "rejected": "c", "rejected_reward": -1.0}
    ]


def test_kto_judges_an_answer_by_its_prompts_mean():
    rows = scored(("a", 1.0), ("b", 5.0), ("c", 0.0)) + scored(("d", 9.0), ("e", 9.0), prompt=TALK)
    assert [(row["output"], row["label"]) for row in process(rows, "kto")] == [("a", False), ("b", True), ("c", False)]


def test_conditional_sft_writes_every_reward_into_its_prompt():
    rows = scored(("a", 1.234), ("b", -2.0)) + scored(("c", 0.0), prompt=TALK)
    made = process(rows, "csft")
    assert [row["input"] for row in made] == [
        "one? <rm_score>: 1.23 ",
        "one? <rm_score>: -2.00 ",
        [{"role": "user", "content": "four? <rm_score>: 0.00 "}],
    ]
    assert [(row["output"], row["reward"]) for row in made] == [("a", 1.234), ("b", -2.0), ("c", 0.0)]
    assert rows[0]["input"] == "one?" and TALK[0]["content"] == "four?"


def test_normalised_rewards_have_mean_zero_and_deviation_one():
    rows = scored(("a", 10.0), ("b", 14.0), ("c", 18.0))
    told = [float(row["input"].split()[-1]) for row in process(rows, "csft", normalize=True)]
    assert told == pytest.approx([-math.sqrt(1.5), 0, math.sqrt(1.5)], abs=0.005)
    same = process(scored(("a", 2.0), ("b", 2.0)), "csft", normalize=True)
    assert {row["input"] for row in same} == {"one? <rm_score>: 0.00 "}


def test_a_template_of_ones_own_leaves_the_prompts_braces_alone():
    assert with_reward("is {reward} {input}?", "[{reward}] {input}", "2.00") == "[2.00] is {reward} {input}?"
    assert with_reward("x", " ({reward})", "2.00") == "x (2.00)"


def test_what_is_asked_for_is_what_was_trained_on():
    assert conditioned("one?", "<rm_score>: 5.00") == with_reward("one?", "{input} <rm_score>: {reward} ", "5.00")
    assert conditioned(TALK, None) is TALK
    parts = [{"role": "user", "content": [{"type": "text", "text": "four?"}]}]
    assert conditioned(parts, "+")[0]["content"] == [{"type": "text", "text": "four? + "}]
