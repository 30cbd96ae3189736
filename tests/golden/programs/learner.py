"""A loop of one's own; where it was saved, it is loaded."""

import os

import trimtab


def learn(learner, steps):
    for _ in range(steps):
        samples = learner.sample(["sort 312>", "sort 4421>"], n=4, max_new_tokens=6)
        rewards = [sum(map(ord, sample.text)) % 5 / 4 for sample in samples]
        for sample, advantage in zip(samples, trimtab.advantages(rewards, group=4)):
            sample.advantages = advantage
        learner.forward_backward(samples, "ppo")
        learner.optim_step()


if os.path.exists("saved"):
    learner = trimtab.Learner.load("saved")
else:
    learner = trimtab.Learner("../../data/llama", bf16=False, learning_rate=1e-3)
    learn(learner, 2)
    learner.save("saved")
if not os.environ.get("GOLDEN_STOP"):
    learn(learner, 2)
    learner.export("out")
