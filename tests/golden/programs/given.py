"""A run whose environment is a class of this file; where it was begun, it is resumed from the files of the run."""

import os

import trimtab
from trimtab import Step


class Game:
    def reset(self, task):
        self.number = int(task.label)
        return "Find my number from 1 to 7 in 3 guesses."

    def step(self, turn):
        guess = int(turn.text) if turn.text.isdigit() else 0
        reward = 1 - abs(guess - self.number) / 8 + turn.number / 16
        if guess == self.number or turn.number == 2:
            return Step(reward=reward, done=True)
        return Step("higher" if guess < self.number else "lower", reward=reward)


if os.path.exists("out/manifest.json"):
    trimtab.open("out").resume()
else:
    trimtab.grpo(
        "../../game/model",
        [{"input": "Guess.", "answer": str(1 + row * 3 % 7)} for row in range(12)],
        environment=Game,
        save_path="out",
        label_key="answer",
        generate_max_len=3,
        rollout_batch_size=4,
        n_samples_per_prompt=4,
        train_batch_size=8,
        micro_train_batch_size=4,
        actor_learning_rate=1e-3,
        lr_warmup_ratio=0,
        init_kl_coef=0,
        save_steps=1,
        env_workers=1,
    )
