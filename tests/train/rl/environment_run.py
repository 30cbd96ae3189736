"""Small RL runs on a game, through the real command."""

import json
from pathlib import Path

from tests.train.rl.rl_run import rows, weights
from trimtab.embedded.guess_game import write
from trimtab.train.metrics import read_rows

PROMPTS, BATCH, SAMPLES = 10, 4, 4
BOUND = 2
AHEAD = f"--async_train --async_staleness {BOUND} --rollout_slots 6"

# A number is to be found; some rows break, every answer takes a while, and a journal keeps who was told what.
GAME = """
import json, os, random, time
from trimtab.embedded.guess_game import Guess
from trimtab.envs.types import Step

BREAKS, JOURNAL = {breaks}, {journal!r}

class Game(Guess):
    def reset(self, task):
        self.row, self.seconds = task.row, random.Random(f"{{task.seed}} {{task.sample}}")
        self.task = f"{{task.seed}} {{task.sample}}"
        return super().reset(task)

    def step(self, turn):
        if JOURNAL:
            with open(JOURNAL, "a") as journal:
                journal.write(json.dumps([self.task, turn.number, turn.text, f"{{os.getpid()}} {{id(self)}}"]) + "\\n")
        time.sleep({slow} * self.seconds.lognormvariate(0, 1))
        if self.row in BREAKS and turn.number == 1:
            raise ValueError(f"row {{self.row}} is broken")
        step = super().step(turn)
        step.reward += 0.125 * turn.number  # of every turn
        if {forgetful}:
            step.messages = str(random.randint(1, 7)) if not step.done else ""
        return step
"""


def write_game(
    folder: Path,
    *,
    breaks: tuple[int, ...] = (),
    slow: float = 0.0,
    forgetful: bool = False,
    journal: Path | None = None,
) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    game = folder / "game.py"
    game.write_text(GAME.format(breaks=breaks, slow=slow, forgetful=forgetful, journal=journal and str(journal)))
    return game


def told_again(journal: Path) -> int:
    """How many turns were told to a second instance in the same words, as the record has them."""
    told: dict[tuple, set[str]] = {}
    for line in journal.read_text().splitlines():
        task, number, text, instance = json.loads(line)
        told.setdefault((task, number, text), set()).add(instance)
    return sum(len(instances) - 1 for instances in told.values())


def write_task(folder: Path) -> Path:
    return write(folder, train_rows=PROMPTS, test_rows=3)


def arguments(folder: Path, out: Path, game: Path | str, *more: str) -> list[str]:
    source = f"--agent_func_path {game}" if str(game).endswith(".py") else f"--environment {game}"
    fixed = (
        f"grpo --pretrain {folder}/model --prompt_data {folder}/prompts.jsonl --label_key label {source} "
        f"--generate_max_len 3 --rollout_batch_size {BATCH} --n_samples_per_prompt {SAMPLES} --train_batch_size 8 "
        f"--init_kl_coef 0 --actor_learning_rate 3e-3 --lr_warmup_ratio 0 --save_steps 1 --env_workers 1 "
        f"--save_path {out} --ckpt_path {out}/checkpoints"
    )
    return [*fixed.split(), *" ".join(more).split()]


def kept(out: Path) -> list[dict]:
    """rollouts.jsonl without what the clock says."""
    found = read_rows(out / "rollouts.jsonl")
    for row in found:
        row["environment"].pop("seconds_environment")
        for turn in row["turns"]:
            turn.pop("seconds")
    return found


def result(out: Path) -> tuple[list[dict], list[dict], dict]:
    return rows(out), kept(out), weights(out)


def check_ledger(out: Path, places: int = PROMPTS) -> list[dict]:
    """Each place trained, or named as failed, once; none too old."""
    lines = read_rows(out / "ledger.jsonl", key="iteration")
    settled = sorted(place for line in lines for place in [*line["trained"], *line["filtered"], *line["failed"]])
    assert settled == list(range(places))
    ages = [line["iteration"] - 1 - version for line in lines for version in line["versions"]]
    assert min(ages) >= 0 and max(ages) <= BOUND
    return lines
