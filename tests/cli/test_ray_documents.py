"""Commands of train_ppo_ray that people have in their scripts, at full size: a dry run reads everything, needs no
cluster, and says where the models would be."""

import pytest

from tests import warm
from tests.cli.test_rl_documents import folder, judge, with_places  # noqa: F401
from tests.config.test_documented_commands import RAY_COMMANDS


@pytest.mark.short(6)
@pytest.mark.parametrize("words, devices", RAY_COMMANDS)
def test_a_documented_command_passes_a_dry_run_and_shows_its_layout(folder, judge, tmp_path, words, devices):  # noqa: F811
    log = tmp_path / "log"
    argv = ["ppo", "--ray", *with_places(words, folder, judge, tmp_path), "--dry_run"]
    assert warm.run(argv, log=log) == 0, log.read_text()
    lines = log.read_text().splitlines()
    (first,) = [at for at, line in enumerate(lines) if line.split() == ["#", "role", "nodes", "processes", "devices"]]
    rows = [line.split() for line in lines[first + 1 : first + 1 + len(devices)]]
    assert {row[1]: row[-1] for row in rows} == {role: text.split()[-1] for role, text in devices.items()}, rows
    assert all(" ".join(row).endswith(devices[row[1]]) for row in rows)
    assert not list(tmp_path.glob("out*")) and not (tmp_path / "checkpoints").exists()
