"""Time of an iteration on a cluster, part by part.

    rollout   a forward pass a prompt token; then for each token of an answer an engine reads its weights and the keys
              and values of the answers that it writes at once, and with several devices adds their results up
    sync      the policy's weights are gathered from its processes and sent to the engines
    scoring   a forward pass a token of every model that is asked: policy, reference, critic, reward models
    update    the passes of actor and critic, and the optimiser
    moving    what waits in main memory meanwhile: the optimiser and an engine that sleep

The loop asks one role after the other, so that seconds add up also where roles have devices of their own. What
processes send each other in a pass is overlapped with its arithmetic: the longer one counts.
"""

from dataclasses import dataclass

from trimtab.distributed.fsdp import GRADIENT_DTYPES, keeps_whole_sums
from trimtab.distributed.ray.placement import Layout, Pool
from trimtab.plan.cluster.shares import EngineShare, Share, Shares
from trimtab.plan.hardware import MAIN_MEMORY
from trimtab.plan.models import PlannedModel
from trimtab.plan.speed import OPTIMISER_BYTES, Clock, config_of, scores_policy, size

REDUCE_SECONDS = 20e-6  # the least time of a sum over the devices of an engine
PARTS = ("rollout", "sync", "scoring", "update", "moving")


@dataclass(frozen=True)
class Iteration:
    seconds: dict[str, float]
    tokens: int
    sync_bytes: int
    link: str
    """What the weights go over."""
    sent: float
    """Seconds of sending between processes in passes, were it not overlapped."""
    unhidden: float
    """Of these, what arithmetic does not hide."""

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())


class Timing:
    def __init__(self, shares: Shares, clock: Clock):
        self.shares, self.clock = shares, clock
        self.options, self.machines, self.work = shares.options, shares.machines, shares.work
        # Of a token: sums over a model's parameters, which are many.
        self.forward_seconds = {model: clock.forward(model.whole) for model in shares.models}
        self.training_seconds = {model: clock.training(model.whole) for model in shares.models}
        self.samples = self.options.rollout_batch_size * self.options.n_samples_per_prompt
        rows = self.work.rows
        self.tokens = self.options.rollout_batch_size * rows.prompt + self.samples * rows.answer

    def of(self, layout: Layout, pools: dict[str, Share], engine: EngineShare, *, sleep: bool) -> Iteration:
        """`pools`: the share of each pool, by its name."""
        seconds = dict.fromkeys(PARTS, 0.0)
        seconds["rollout"] = self.rollout(layout, engine)
        seconds["sync"], link = self.sync(layout)
        sent = unhidden = 0.0
        for pool in layout.pools:
            for model in self.shares.held_by(pool):
                measures = {"scoring": self.scoring, "update": self.update}
                if model.role == "actor" and not self.scores_policy(layout):
                    del measures["scoring"]
                for part, measure in measures.items():
                    arithmetic, sending = measure(model, pool, pools[pool.name])
                    seconds[part] += max(arithmetic, sending)
                    sent += sending
                    unhidden += max(0.0, sending - arithmetic)
        if sleep:
            learnt = [model for model in self.shares.held_by(layout.pools[0]) if model.trained]
            split = layout.pools[0].size if self.options.zero_stage > 0 else 1
            state = 0 if self.options.adam_offload else sum(12 * model.learnt for model in learnt) // split
            seconds["moving"] = 2 * self.machines.moving(state) + self.machines.moving(engine.weights)
        return Iteration(seconds, self.tokens, self.shares.actor.weights, link, sent, unhidden)

    # ---- rollout

    def rollout(self, layout: Layout, engine: EngineShare) -> float:
        if not engine.fits:
            return float("inf")
        actor, rows = self.shares.actor, self.work.rows
        engines = layout.engines
        number, devices = (engines.number, engines.tensor_parallel) if engines else (layout.pool_of("actor").size, 1)
        samples = -(-self.samples // number)
        shared = engines is None or self.options.enable_prefix_caching
        prompts = samples / rows.group if shared else samples
        forward = self.forward_seconds[actor] / devices
        traffic = actor.weights + engine.slots * (rows.prompt + rows.answer / 2) * self.shares.kv_token_bytes
        config = config_of(actor.whole)
        step = self.clock.decode_step(actor.whole, engine.slots / devices, traffic / devices)
        if devices > 1:
            result = engine.slots * config.hidden_size * 2  # of a layer: bf16, twice added up
            once = REDUCE_SECONDS + 2 * result * (devices - 1) / devices / self.machines.within()
            step += 2 * config.num_hidden_layers * once
        waves = samples / engine.slots if samples > engine.slots else 1.0
        return prompts * rows.prompt * forward + waves * rows.answer * step

    # ---- weights

    def sync(self, layout: Layout) -> tuple[float, str]:
        """Seconds, and what the weights go over."""
        machines, engines, weights = self.machines, layout.engines, self.shares.actor.weights
        pool = layout.pool_of("actor")
        gathered = machines.gathering(weights, pool.size) if self.options.zero_stage > 0 else 0.0
        if engines is None:
            return gathered, "gathering alone"
        if engines.pool is not None:
            return gathered + weights / engines.tensor_parallel / self.clock.bandwidth, "the same device"
        if layout.devices <= machines.gpus:
            return gathered + weights / machines.within(), f"{machines.within() / 1e9:.3g} GB/s within a machine"
        return gathered + weights / machines.between(), f"{machines.between() / 1e9:.3g} GB/s from one device"

    # ---- passes

    @property
    def steps(self) -> int:
        """Optimiser steps of an iteration."""
        return self.options.max_epochs * max(1, self.samples // self.options.train_batch_size)

    def scores_policy(self, layout: Layout) -> bool:
        return scores_policy(self.options, apart=layout.engines is not None, accelerator=True)

    def scoring(self, model: PlannedModel, pool: Pool, share: Share) -> tuple[float, float]:
        """Seconds of arithmetic, and of sending meanwhile."""
        tokens = self.tokens / pool.size
        size = min(share.memory.tokens, model.pass_tokens or share.memory.tokens)
        sending = 0.0
        split = self.options.zero_stage == 3 or model.offload
        if split and pool.size > 1:
            passes = -(-tokens // size)
            sending = passes * self.machines.gathering(model.weights, pool.size)
            if model.offload:
                sending += passes * self.machines.moving(model.weights / pool.size)
        elif model.offload:
            sending = self.machines.moving(model.weights)
        return tokens * self.forward_seconds[model], sending

    def update(self, model: PlannedModel, pool: Pool, share: Share) -> tuple[float, float]:
        if not model.trained:
            return 0.0, 0.0
        options, machines = self.options, self.machines
        steps = self.steps
        split = pool.size if options.zero_stage > 0 else 1
        tokens = options.max_epochs * self.tokens / pool.size
        arithmetic = tokens * self.training_seconds[model]
        gathering = machines.gathering(model.weights, pool.size)
        times = 2 * share.passes if options.zero_stage == 3 else min(options.zero_stage, 1)
        width = GRADIENT_DTYPES[options.grad_accum_dtype].itemsize
        gradients = machines.gathering(width * model.learnt, pool.size) * (1 if options.zero_stage > 0 else 2)
        summed = 1 if keeps_whole_sums(model.learnt) else share.passes
        sending = steps * (times * gathering + summed * gradients)
        state = OPTIMISER_BYTES * model.learnt / split
        if options.adam_offload:
            # Gradients go down, the masters come up to be gathered; nothing hides the optimiser's own work.
            sending += steps * machines.moving((width + 4 * max(1, times)) * model.learnt / split)
            return arithmetic + steps * state / MAIN_MEMORY, sending
        return arithmetic + steps * state / self.clock.bandwidth, sending


def activation_bytes(model: PlannedModel, tokens: int) -> float:
    """Kept for the backward pass, of a token and a unit of layers x width."""
    return model.training_bytes(tokens).kept / tokens / size(model.whole)
