import pytest

from tests.envs.episodes import make_policy


@pytest.fixture(scope="session")
def policy():
    """One that no test changes."""
    return make_policy()
