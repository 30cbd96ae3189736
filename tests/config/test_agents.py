"""Options of environments."""

import pytest

from trimtab.config.parser import parse
from trimtab.config.resolved_config import settled_and_checked
from trimtab.config.rl_jobs import GRPOOptions, TailOptions
from trimtab.errors import UserError


def options(**changes) -> GRPOOptions:
    return GRPOOptions(**{"pretrain": "model", "save_path": "out", **changes})


def checked(given: GRPOOptions) -> list[str]:
    return settled_and_checked(given)[1]


def test_openrlhfs_dotted_names_are_ours():
    found = parse(GRPOOptions, ["--train.agent_func_path", "a.py", "--train.async_enable", "--rollout.batch_size", "3"])
    assert (found.agent_func_path, found.async_train, found.rollout_batch_size) == ("a.py", True, 3)


@pytest.mark.parametrize(
    "source, problem",
    [
        ({"environment": "gym:CartPole"}, "--environment 'gym:CartPole' is none that is known: give one of gem:NAME"),
        ({"environment": "gem:"}, "--environment 'gem:' is none"),
        ({"agent_func_path": "gone.py:Game"}, "--agent_func_path: gone.py does not exist"),
        ({"agent_func_path": "game"}, "--agent_func_path game is not a Python file"),
        ({"agent_func_path": "game.py", "environment": "gem:a"}, "an episode has one environment"),
        ({"environment": "rg:a", "episode_max_len": 8}, "--episode_max_len 8 is less than --generate_max_len 1024"),
    ],
)
def test_a_source_that_cannot_be_is_refused(source, problem):
    with pytest.raises(UserError, match=problem):
        checked(options(**source))


def test_an_environment_may_bring_its_rows_and_its_reward():
    for source in ({}, {"environment": "rg:chain_sum"}):
        given = options(**source)
        assert given.plays is bool(source) and given.may_lack("prompt_data") is bool(source)
        assert not given.may_lack("pretrain")
    with pytest.raises(UserError, match="--prompt_data is missing"):
        checked(options())


def test_options_of_environments_do_nothing_without_one():
    told = checked(options(prompt_data="owner/data", reward_verifier="exact", max_turns=3, turn_reward="returns"))
    for name in ("max_turns", "turn_reward"):
        assert f"--{name} has no effect without --agent_func_path or --environment" in told


def test_a_file_is_no_environment_of_a_library(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").touch()
    with pytest.raises(UserError, match="a file is given by --agent_func_path"):
        checked(options(environment="game.py:Game"))


def test_the_longest_rollout_is_the_longest_episode():
    assert options(environment="rg:a", episode_max_len=5000).longest_rollout == 5000
    assert options(prompt_max_len=10, generate_max_len=20).longest_rollout == 30


def test_tail_methods_refuse_environments():
    with pytest.raises(UserError, match="--environment rg:a: tail methods learn from single answers"):
        settled_and_checked(TailOptions(pretrain="m", prompt_data="o/d", reward_pretrain="r", environment="rg:a"))
