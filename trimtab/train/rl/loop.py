"""The RL loop: sample, score, shape, update, log, save.

It is ordinary sequential code in one process and speaks to roles (distributed/launcher), which may be in this process
or in many. What it remembers between iterations is a few numbers; what it is in the middle of is an `Iteration`. Both
are in every checkpoint, so a run that was stopped anywhere goes on as if it had not been.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from trimtab.algos.advantages import joined_moments
from trimtab.algos.policy_losses import adapted_kl_coefficient
from trimtab.config.jobs import RLOptions
from trimtab.data.order import SampleOrder
from trimtab.distributed.launcher import EngineLost, Group
from trimtab.errors import CannotWrite, Interrupted, RunFailed, UserError
from trimtab.interrupts import StopRequest
from trimtab.rewards.types import RewardFailed
from trimtab.train.alarms import ended_badly, go_on_from
from trimtab.train.launch import gc_frozen
from trimtab.train.micro_batch_limit import NoRoom, PassLimit
from trimtab.train.rl.async_client import RolloutStalled
from trimtab.train.rl.evaluation import Evaluation
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.files import RunFiles
from trimtab.train.rl.micro_batches import MicroBatcher, TextMixture, counted, mini_batches, totals_of
from trimtab.train.rl.roles import LayerCompilation
from trimtab.train.rl.rollout_client import EnvironmentFailed, RolloutClient
from trimtab.train.rl.source import RolloutSource, Sampled
from trimtab.train.rl.state import Counters, Iteration, Roles, row_of, timed
from trimtab.train.rl.token_advantages import compute_advantages, penalties, trained, with_advantage
from trimtab.train.rl.weight_sync import check_row, check_samples, make_weight_sync


class RLRun:
    iteration_class = Iteration

    def __init__(
        self,
        options: RLOptions,
        roles: Roles,
        asking: RolloutClient,
        supply: RolloutSource,
        order: SampleOrder,
        files: RunFiles,
        evaluation: Evaluation | None = None,
        text: TextMixture | None = None,
    ):
        """`supply`: where experience comes from; `order`: the prompts one by one, over all episodes; `text`: what is
        learnt beside the answers."""
        self.options, self.roles, self.asking, self.supply = options, roles, asking, supply
        self.order, self.files, self.evaluation, self.text = order, files, evaluation, text
        self.counters = Counters(max(options.init_kl_coef, 0.0))
        self.iteration: Iteration | None = None
        self.passes = MicroBatcher(options, larger_scoring=self.on_accelerator)
        self.compiling = LayerCompilation(options, asking.stores["train"], files.total)
        self.schedule()
        self.publishing = make_weight_sync(options, roles, asking.stores["train"], self.passes)
        self.publishing.connect()
        asking.mend = self.mend
        self.engine_is_checked = False

    def speak_to(self, groups: dict[str, Group]) -> None:
        """The same roles, built anew."""
        self.roles = type(self.roles)(**groups)
        self.asking.speak_to(self.roles.rollouts, self.roles.reward)
        self.schedule()
        self.compiling.settle(self.roles)
        with self.supply.paused():
            self.publishing.speak_to(self.roles)
            self.publish()
        self.supply.built_anew()

    def schedule(self) -> None:
        """Tell those that learn how many steps there will be."""
        steps = self.files.total * self.options.updates_per_iteration
        for role in (self.roles.actor, self.roles.critic):
            if role is not None:
                role.call("schedule", steps=steps)

    # ---- the loop

    def train(self, stop: StopRequest, *, taken_over: bool = False) -> None:
        """`taken_over`: this run goes on with the counters and the iteration of one that was begun anew."""
        with self.files.run_folder.locked():
            resumed = taken_over or (self.resume() if self.options.load_checkpoint else False)
            if not taken_over:
                decided = self.compiling.decided
                self.files.manifest["compiled"] = self.compiling.settle(self.roles)
                if stop.signal:  # which may have reached a compiler too, so that it failed: the next start decides
                    self.compiling.decided = decided
            # Before the start is measured there is no row to keep, not even one of a measurement that came later.
            begun = self.counters.iteration > 0 or self.counters.start_is_measured
            self.files.open(self.counters.iteration if begun else -1, self.roles, resumed=resumed)
            # The disk may have been full when it was to be told.
            if resumed and not taken_over and self.iteration is None:
                self.files.keep_places(self.counters.iteration, self.supply.settled())
            with gc_frozen() if self.options.environment_source else nullcontext():
                self.run_iterations(stop)

    def run_iterations(self, stop: StopRequest) -> None:
        try:
            self.start(stop)
            while not self.is_done():
                row = self.iterate(stop)
                if row is None:
                    break
                self.files.write(row)
                if self.engine_must_agree and not (self.options.keep_dropout or self.options.lora_dropout):
                    check_row(row)
                if self.options.save_steps > 0 and self.counters.iteration % self.options.save_steps == 0:
                    self.save()
                if stop.signal and not self.is_done():
                    self.leave(stop)
            self.conclude(stop)
            if self.counters.skipped_in_a_row:
                raise RunFailed(ended_badly(self.counters.skipped_in_a_row, "updates", self.files.folder))
        except CannotWrite as error:
            raise UserError(f"{error}; {self.files.rescue(*self.checkpoint())}") from error
        except (RewardFailed, EnvironmentFailed, NoRoom, RolloutStalled) as error:
            try:
                # After a lack of memory what processes hold together can be saved in parts, but not gathered.
                where = go_on_from(self.save(export=not isinstance(error, NoRoom)))
            except CannotWrite:
                where = self.files.rescue(*self.checkpoint())
            raise RunFailed(f"{error}; {where}") from error
        finally:
            self.files.close()

    def start(self, stop: StopRequest) -> None:
        """What is known of the policy before its first update, once: also if the run is resumed before that."""
        if self.counters.start_is_measured:
            return
        if figures := self.measure_start(stop):
            self.files.write({"step": 0, **figures})
        self.counters.start_is_measured = True

    def measure_start(self, stop: StopRequest) -> dict[str, float]:
        return {} if self.evaluation is None else self.evaluate(stop)

    def conclude(self, stop: StopRequest) -> None:
        self.files.save_models(self.roles)

    def iterate(self, stop: StopRequest) -> dict | None:
        """One rollout and everything that is learnt from it. None: no prompt was left to learn from."""
        if self.iteration is None:
            self.iteration = self.begin(stop)
        work = self.iteration
        if work is None:
            return None
        for samples in self.updates_of(work)[len(work.reports) :]:
            if stop.signal:
                self.leave(stop)
            with self.timed(work.seconds, "update"):
                self.update(work, samples)
        with self.timed(work.seconds, "sync") if self.options.uses_vllm else nullcontext():
            self.publish()
        return self.finish(work, self.measure(work, stop))

    @contextmanager
    def timed(self, seconds: dict[str, float], phase: str) -> Iterator[None]:
        with timed(seconds, phase), self.files.time_line.during(phase, self.counters.iteration + 1):
            yield

    def begin(self, stop: StopRequest) -> Iteration | None:
        """Sample, score and shape."""
        if self.compiling.look(self.roles):
            self.files.manifest["compiled"] = self.compiling.decided
        seconds: dict[str, float] = {}
        with self.timed(seconds, "rollout"):
            sampled = self.sample(stop)
        if sampled is None or stop.signal:
            self.leave(stop)
        experience, prompts, figures = sampled
        if experience is None:
            self.files.keep_places(self.counters.iteration + 1, self.supply.settled())
            return None
        if not bool(experience.drawn_E.any()):
            raise EnvironmentFailed(
                f"iteration {self.counters.iteration + 1}: the model drew no token in any of {len(experience)} samples"
                "; look at what ends them before its first turn (is --episode_max_len long enough for the opening?)"
            )
        if "age" in figures and experience.versions_N is not None:
            experience.fresh_N = (experience.versions_N == self.counters.iteration).float()
        with self.timed(seconds, "scoring"):
            if self.engine_must_agree and not self.engine_is_checked:
                check_samples(experience, self.passes, self.roles.actor)
                self.engine_is_checked = True
            self.score(experience)
        figures |= self.compute_advantages(experience)
        return self.iteration_class(experience, prompts, figures, seconds=seconds)

    def sample(self, stop: StopRequest) -> Sampled | None:
        """Answers and their rewards. None: they were given up."""
        with self.learners_asleep():
            return self.supply.next(self.counters.iteration, self.counters.prompts_used, stop)

    @contextmanager
    def learners_asleep(self) -> Iterator[None]:
        """--deepspeed_enable_sleep: inside, those that learn give their device's memory to those that answer."""
        learners = [role for role in (self.roles.actor, self.roles.critic) if role is not None]
        if not self.options.deepspeed_enable_sleep:
            learners = []
        for role in learners:
            role.call("sleep")
        try:
            yield
        finally:
            for role in learners:
                role.call("wake")

    @property
    def engine_must_agree(self) -> bool:
        """Whether sampled log-probs are the trainer's but for rounding. A recording may be of other weights."""
        return self.asking.engine_exact and not self.options.replay

    def score(self, experience: Experience) -> None:
        """What the other models say of the sampled tokens."""
        roles = self.roles
        if self.supply.exact:
            experience.old_N = experience.sampled_N
        elif self.scores_old_policy(experience):
            # Where the engine's and the trainer's sums differ, a ratio must compare like with like.
            self.passes.fill(experience, "old_N", roles.actor, "log_probs")
        for name in ("reference", "teacher"):
            if (role := getattr(roles, name)) is not None:
                self.passes.fill(experience, f"{name}_N", role, "log_probs")
        if self.roles.critic is not None:
            self.passes.fill(experience, "values_N", self.roles.critic, "values")
            if self.options.bootstrap_truncated:
                self.passes.fill(experience, "after_N", self.roles.critic, "values", experience.cut_off_S, after=True)

    @property
    def on_accelerator(self) -> bool:
        return self.files.manifest["device_type"] != "cpu"

    def scores_old_policy(self, experience: Experience) -> bool:
        there = {name: getattr(self.roles, name) is not None for name in ("reference", "teacher")}
        # Of an episode in several branches the KL to come may be in another pass.
        leaves_kl = self.leaves_kl_to_update and experience.branches_S is None
        return self.options.scores_old_policy(**there, leaves_kl=leaves_kl)

    @property
    def leaves_kl_to_update(self) -> bool:
        updated = self.counters.iteration >= self.options.freezing_actor_steps
        return updated and self.options.leaves_kl_to_update(accelerator=self.on_accelerator)

    def compute_advantages(self, experience: Experience) -> dict[str, float]:
        """Rewards become advantages; what there is to say of them."""
        options, counters = self.options, self.counters
        if not options.running_reward_norm:
            return compute_advantages(experience, options, counters.kl_coefficient)
        rewards_E = experience.rewards_S[experience.firsts_E] - penalties(experience, options)
        counters.reward_moments = joined_moments(counters.reward_moments, rewards_E[experience.drawn_E])
        return compute_advantages(experience, options, counters.kl_coefficient, counters.reward_moments)

    def updates_of(self, work: Iteration) -> list[list[int]]:
        """The samples of every update of an iteration: a pure function of its number."""
        options = self.options
        return [
            samples
            for epoch in range(options.max_epochs)
            for samples in mini_batches(
                work.experience, options.groups_per_update, (options.seed, self.counters.iteration, epoch)
            )
        ]

    def update(self, work: Iteration, samples: list[int]) -> None:
        """One optimiser step of the critic and of the actor."""
        experience, reports = work.experience, work.unfinished
        samples = trained(experience, samples, self.options)
        if self.roles.critic is not None and "critic" not in reports:
            reports["critic"] = self.passes.until_they_fit(lambda: self.update_critic(experience, samples))
            self.counters.critic_steps += 1
        if self.counters.iteration >= self.options.freezing_actor_steps:
            reports["actor"] = self.passes.until_they_fit(lambda: self.update_actor(experience, samples))
            self.counters.actor_steps += 1
        for report in reports.values():
            self.counters.count(bool(report.pop("applied")))
        work.reports.append(reports)
        work.unfinished = {}

    def update_critic(self, experience: Experience, samples: list[int]) -> dict[str, float]:
        critic = self.roles.critic
        assert critic is not None
        columns = ["values_N", "returns_N", *(["counts_N"] if experience.branches_S is not None else [])]
        parts = self.passes.parts(critic, experience, samples, *columns)
        return self.passes.send(
            critic, "update", parts, totals=totals_of(experience, samples), step=self.counters.critic_steps
        )[0]

    def update_actor(self, experience: Experience, samples: list[int]) -> dict[str, float]:
        options, counters, actor = self.options, self.counters, self.roles.actor
        kl_loss = options.use_kl_loss and self.roles.reference is not None
        kl_left = experience.lacks_kl
        learnt = samples
        if not kl_loss and not kl_left and options.entropy_loss_coef is None and options.aux_loss_coef <= 0:
            # Samples without an advantage have no gradient and are left out. One stays even where no sample has an
            # advantage: an optimiser step needs a backward pass in every process.
            learnt = with_advantage(experience, samples) or samples[:1]
        columns = ["advantages_N", "sampled_N"]
        if options.updates_per_iteration > 1:  # else the policy that is updated is the old one
            columns.append("old_N")
        if kl_loss or kl_left:
            columns.append("reference_N")
        if kl_left:
            columns.append("remaining_N")
        if experience.fresh_N is not None:
            columns.append("fresh_N")
        if experience.branches_S is not None:
            columns.append("counts_N")
        parts = self.passes.parts(actor, experience, learnt, *columns)
        totals = totals_of(experience, samples)
        totals["seen_tokens"] = max(float(experience.lengths_S[learnt].sum()), 1.0)
        totals["row_tokens"] = max(counted("tokens", *parts), 1.0)
        if experience.fresh_N is not None:
            totals["fresh_tokens"] = float(experience.fresh_N[experience.tokens_of(learnt)].sum())
        if self.text is not None:
            texts = self.text.parts(counters.actor_steps, actor.size, self.passes)
            totals["text_tokens"] = counted("trained", texts)
            parts = [[*answers, text] for answers, text in zip(parts, texts)]
        return self.passes.send(
            actor,
            "update",
            parts,
            totals=totals,
            step=counters.actor_steps,
            kl_coefficient=counters.kl_coefficient,
        )[0]

    def publish(self) -> None:
        """Whoever answers prompts does so with the weights as they are now."""
        with self.supply.paused():
            try:
                self.publishing.publish(self.version)
            except EngineLost as lost:
                self.mend(lost)

    def mend(self, lost: EngineLost) -> None:
        """Have another engine in the place of one that is gone, with the weights of all, while nobody writes."""
        self.publishing.mend(lost, self.version)
        self.supply.engine_replaced()

    @property
    def version(self) -> int:
        """Of the policy's weights: the iterations whose updates are all done."""
        work = self.iteration
        return self.counters.iteration + (work is not None and len(work.reports) == len(self.updates_of(work)))

    def measure(self, work: Iteration, stop: StopRequest) -> dict[str, float]:
        """Evaluate, where that is due after this iteration. The iteration is still in hand: a run that is stopped here
        comes back with all updates done and this still to do."""
        if not self.evaluation_is_due(work):
            return {}
        with self.timed(work.seconds, "evaluation"):
            return self.evaluate(stop)

    def evaluate(self, stop: StopRequest) -> dict[str, float]:
        assert self.evaluation is not None
        with self.supply.paused(), self.weights_to_save():
            figures = self.evaluation.run(self.asking)
        if figures is None:
            self.leave(stop)
        assert self.evaluation.shown is not None
        self.files.keep_evaluation(self.counters.iteration + (self.iteration is not None), self.evaluation.shown)
        return figures

    @contextmanager
    def weights_to_save(self) -> Iterator[None]:
        """Inside, the policy's weights are those that are saved: with --enable_ema their average."""
        if not self.options.enable_ema:
            yield
            return
        self.roles.actor.call("show_average")
        self.publish()
        try:
            yield
        finally:
            self.roles.actor.call("hide_average")
            self.publish()

    def finish(self, work: Iteration, measured: dict[str, float]) -> dict:
        """Count the iteration and let it go, adapt the KL coefficient, and say what happened and was `measured`."""
        options, counters = self.options, self.counters
        counters.iteration += 1
        counters.prompts_used += work.prompts
        self.iteration = None
        # In one breath with that: a checkpoint that is made from here on knows that the batch is trained.
        self.supply.trained()
        self.files.keep_places(counters.iteration, self.supply.settled())
        row = row_of(work, counters, options.async_staleness)
        row |= {
            "epoch": round(counters.prompts_used / self.order.samples_per_epoch, 6),
            **self.passes.limit.columns(),
            **measured,
        }
        if work.experience.lacks_kl and not options.use_kl_loss:
            row["return"] -= counters.kl_coefficient * row["kl_answer"]
        if self.roles.reference is not None:
            row["kl_coefficient"] = counters.kl_coefficient
            if options.kl_target is not None:
                args = (row["kl"], options.kl_target, options.kl_horizon, row["samples"])
                counters.kl_coefficient = adapted_kl_coefficient(counters.kl_coefficient, *args)
        self.files.keep_samples(counters.iteration, work.experience)
        for process, told in self.supply.spans().items():
            self.files.time_line.tell(process, told, counters.iteration)
        memory = max(self.roles.actor.call("memory_gib"))
        return (
            row | self.compiling.columns() | self.files.clock(work.seconds, row["tokens"], options.max_epochs, memory)
        )

    def is_done(self, after: Iteration | None = None) -> bool:
        """Whether nothing is left to do, or nothing will be after the work in hand."""
        prompts, iterations = (after.prompts, 1) if after else (0, 0)
        spent = self.counters.prompts_used + prompts >= self.order.steps
        return spent or 0 < self.options.max_steps <= self.counters.iteration + iterations

    def evaluation_is_due(self, work: Iteration) -> bool:
        if self.evaluation is None:
            return False
        last = self.is_done(after=work)
        every = self.options.eval_steps
        return last or (every > 0 and (self.counters.iteration + 1) % every == 0)

    # ---- what is on disk

    def save(self, *, export: bool = True) -> Path | None:
        return self.files.save(*self.checkpoint(), export=export)

    def checkpoint(self) -> tuple[int, Roles, dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Its iteration, whose state belongs to it, the tensors of the work in hand and of what is not trained yet, and
        the rest of both."""
        tensors: dict[str, dict[str, Tensor]] = {}
        state: dict[str, Any] = {"counters": vars(self.counters), "pass_limit": vars(self.passes.limit)}
        state["compiled"] = self.compiling.decided
        if self.iteration is not None:
            tensors["experience"], state["iteration"] = self.iteration.on_disk()
        tensors["ahead"], ahead = self.supply.state(in_hand=self.iteration is not None)
        if ahead is not None:
            state["ahead"] = ahead
        return self.counters.iteration, self.roles, tensors, state

    def resume(self) -> bool:
        found = self.files.load(self.roles)
        if found is None:
            return False
        tensors, state = found
        self.counters = Counters(**state["counters"])
        self.passes.limit = PassLimit(**state.get("pass_limit", {}))
        self.compiling.decided = state.get("compiled", {})  # earlier versions compiled nothing
        if "iteration" in state:
            self.iteration = self.iteration_class.from_disk(tensors["experience"], state["iteration"])
        self.publish()
        if "ahead" in state:
            self.supply.restore(tensors.get("ahead", {}), state["ahead"])
        return True

    def leave(self, stop: StopRequest) -> NoReturn:
        where = go_on_from(self.save())
        raise Interrupted(stop.number, f"stopped in iteration {self.counters.iteration + 1}: {where}")
