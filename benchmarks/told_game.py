"""The game of host_play.py, in a file of its own: the processes it runs in load nothing else."""

import os

from trimtab.envs.types import Step, Task, Turn

RULES = (
    "You are playing a game. A number from 1 to 50 has been chosen, and you are to guess it. After a guess you hear "
    "whether the number is higher or lower. Write your guess in a box, as in \\boxed{7}, and nothing behind it. "
)


class Game:
    """It lasts as long as it was told to, and says something else every time."""

    def reset(self, task: Task) -> str:
        self.said, self.turns = 1 + 97 * task.seed + task.sample, int(os.environ["TOLD_GAME_TURNS"])
        return RULES + f"You have {self.turns} guesses. Enter your first guess to begin."

    def step(self, turn: Turn) -> Step:
        self.turns -= 1
        self.said = self.said * 48271 % 2147483647
        way = "higher" if self.said % 2 else "lower"
        words = f"With {self.turns} turns left you guessed {self.said % 50}, and the number is {way}."
        return Step(words, done=self.turns == 0)
