from pathlib import Path

import pytest

from tests.config.every_job import EVERY_JOB
from trimtab.cli.main import VERBS as OUR_VERBS
from trimtab.config import aliases
from trimtab.config.jobs import JOBS
from trimtab.config.option import find, options_of


def test_every_word_leads_to_options_that_exist_together_in_a_job():
    for entry in aliases.WORDS:
        jobs = [job for job in EVERY_JOB if all(name in options_of(job) for name in entry.options)]
        assert entry.options and jobs, entry
        if "." not in entry.word:  # else a word of another kind, which no option can be called
            assert any(find(job, entry.word) is None for job in jobs), f"{entry.word} is an option already"


def test_every_word_for_a_verb_leads_to_verbs_that_exist():
    for word, meant in aliases.VERBS.items():
        assert word not in OUR_VERBS
        for command in meant.split("trimtab ")[1:]:
            assert command.split()[0].rstrip(",:") in {*OUR_VERBS, "--help"}, command


@pytest.mark.parametrize(
    "argv, told",
    [
        ("grpo --beta 0.04", "unknown option --beta; TRL's beta is --init_kl_coef here"),
        ("grpo --reward_funcs x", "TRL's reward_funcs becomes --reward_func FILE.py or --reward_verifier NAME here"),
        ("sft --use_peft", "TRL's use_peft becomes --lora_rank 16 here"),
        ("sft --per_device_eval_batch_size 4", "becomes --micro_train_batch_size here"),
        ("ppo algorithm.adv_estimator=grpo", "verl's algorithm.adv_estimator becomes --advantage_estimator here"),
        ("grpo --loss_type dapo", "TRL's loss_type becomes --loss_reduction here"),
        ("dpo --loss_type ipo", "TRL's loss_type becomes --preference_loss here"),
        ("grpo --max_staleness 4", "TRL's max_staleness becomes --async_train --async_staleness here"),
        (
            "grpo async_training.staleness_threshold=1",
            "verl's async_training.staleness_threshold becomes --async_train",
        ),
        ("sft --max_staleness 4", "TRL's max_staleness has no counterpart in this job"),
        ("sft --beta 1", "TRL's beta has no counterpart in this job"),
        ("sft --train_dataset x", "TRL's train_dataset is --dataset here"),
        (
            "grpo --lr 1 --bogus_thing=3 --beta 0",
            "unknown options --lr, --bogus_thing, --beta; PyTorch's lr is --",
        ),
        ("grpo --lr 1 --bogus_thing=3 --beta 0", "; --bogus_thing: trimtab grpo --help all lists them; TRL's beta is"),
        ("orpo --dataset x", "unknown verb 'orpo'; trimtab dpo --preference_loss orpo is what does this here"),
        ("train", "trimtab sft, dpo, grpo"),
    ],
)
def test_other_tools_words_lead_to_the_right_place(argv, told, trimtab):
    done = trimtab(argv)
    assert done.code == 2 and told in done.err


def test_the_page_shows_the_table():
    page = Path(__file__).parents[2] / "docs" / "words.md"
    assert page.read_text() == aliases.page(), "write it anew: page() of trimtab/config/aliases.py"


def test_what_trl_calls_the_same_is_accepted_or_answered():
    for name in ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"):
        assert find(JOBS["grpo"], name) is not None
