"""Jobs with planted keys: every file they write and all they print is searched for them."""

import sys

import pytest

from tests.rewards.running import running
from tests.train.rl.rl_run import arguments, write_task
from trimtab.cli.main import main
from trimtab.rewards.types import RewardResult

KEY = "0123456789abcdef0123456789abcdef01234567"
PASSWORD, TOKEN = "hunter2-of-the-reward", "qtok-98765"


class LengthReward:
    name, concurrent = "length", True

    def __call__(self, request):
        return RewardResult([float(len(response) % 3) for response in request.responses])

    def close(self):
        pass


def run(words, monkeypatch):
    """As typed: loggers read the command line of the process."""
    monkeypatch.setattr(sys, "argv", ["trimtab", *words])
    return main(list(words))


def assert_nowhere(folder, output, *secrets):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for secret in secrets:
        assert secret not in output.out + output.err
        assert not [str(path) for path in files if secret.encode() in path.read_bytes()]


@pytest.fixture
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def test_keys_and_credentials_of_addresses_are_written_nowhere(task, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(LengthReward, "__str__", lambda self: "length", raising=False)
    with running(LengthReward()) as server:
        with_credentials = server.url.replace("//", f"//user:{PASSWORD}@") + f"/get_reward?api_key={TOKEN}"
        words = arguments(task, tmp_path, "grpo", "--num_episodes 1 --save_steps 1 --logging_steps 1")
        place = words.index("--reward_verifier")
        words[place : place + 2] = ["--remote_rm_url", with_credentials]
        assert run([*words, "--use_wandb", KEY], monkeypatch) == 0
        assert_nowhere(tmp_path, capfd.readouterr(), PASSWORD, TOKEN, KEY)
        # The same run goes on with no credentials at all.
        words[place + 1] = server.url + "/get_reward"
        more = ["--load_checkpoint", "--num_episodes", "2"]
        assert run([*words, *more], monkeypatch) == 0
        output = capfd.readouterr()
        assert "resumed from" in output.out and "remote_rm_url" not in output.out + output.err


def test_an_address_that_cannot_be_reached_is_named_without_its_credentials(task, tmp_path, monkeypatch, capfd):
    words = arguments(task, tmp_path, "grpo", "--use_wandb offline --num_episodes 1")
    place = words.index("--reward_verifier")
    words[place : place + 2] = ["--remote_rm_url", f"http://user:{PASSWORD}@127.0.0.1:9/get_reward?api_key={TOKEN}"]
    monkeypatch.setattr("trimtab.rewards.client.RemoteReward._pause", lambda *_: 0.0)
    assert run(words, monkeypatch) == 1
    output = capfd.readouterr()
    assert "http://127.0.0.1:9/get_reward" in output.err
    assert_nowhere(tmp_path, output, PASSWORD, TOKEN)
