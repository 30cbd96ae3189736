"""A Learner that plays an environment of a process, and a class in its own, and learns from both."""

import json

import trimtab
from trimtab import Step


class Parrot:
    def reset(self, task):
        return "Find my number from 1 to 7 in 3 guesses."

    def step(self, turn):
        return Step("higher", reward=float(turn.text == "4"), done=turn.number == 1)


learner = trimtab.Learner("../../game/model", bf16=False, learning_rate=1e-3)
with open("episodes.jsonl", "w") as file:
    for environment in ("trimtab:guess", Parrot):
        episodes = learner.play(environment, 3, n=4, max_new_tokens=3)
        rewards = [episode.reward for episode in episodes]
        for episode, advantage in zip(episodes, trimtab.advantages(rewards, group=4)):
            (sample,) = episode.samples
            sample.advantages = advantage
            said = [[turn.drawn, turn.text, turn.reward] for turn in episode.said]
            row = {"row": episode.task.row, "reward": episode.reward, "finish": episode.finish, "said": said}
            file.write(json.dumps({**row, "ids": list(sample.ids)}) + "\n")
        samples = [episode.samples[0] for episode in episodes]
        # Which turns meet in a pass depends on who answers when, and with it the last bits of what was drawn with.
        for sample, log_probs in zip(samples, learner.log_probs(samples)):
            sample.log_probs = log_probs
        learner.forward_backward(samples, "ppo")
        learner.optim_step()
learner.export("out")
