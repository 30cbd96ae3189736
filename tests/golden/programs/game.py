"""A number is to be found in three guesses. The model in `../../game` knows the words."""

from task import count_call

from trimtab import Step


class Game:
    def reset(self, task):
        self.number = int(task.label)
        return "Find my number from 1 to 7 in 3 guesses."

    def step(self, turn):
        count_call()
        guess = int(turn.text) if turn.text.isdigit() else 0
        reward = 1 - abs(guess - self.number) / 8 + turn.number / 16
        if guess == self.number or turn.number == 2:
            return Step(reward=reward, done=True)
        return Step("higher" if guess < self.number else "lower", reward=reward)
