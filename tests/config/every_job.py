"""The jobs there are, for tests that hold for each of them, and what is said of options that cannot be meant."""

import pytest

from trimtab.config import jobs
from trimtab.config.parser import parse
from trimtab.config.resolved_config import settled_and_checked
from trimtab.errors import UserError

EVERY_JOB = list(jobs.JOBS.values())
RL = "--pretrain a/b --prompt_data a/b --reward_pretrain a/b"
SFT = "--pretrain a/b --dataset a/b"


def lines_of(verb: str, words: str) -> list[str]:
    """What is said of a verb with these words."""
    return settled_and_checked(parse(jobs.JOBS[verb], words.split()))[1]


def refusal(refused, *given, **named) -> str:
    """The line with which this call is refused."""
    with pytest.raises(UserError) as caught:
        refused(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)
