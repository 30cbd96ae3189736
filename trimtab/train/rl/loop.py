"""The RL loop: sample, score, compute advantages, update, sync weights, log, save.

The loop is sequential code in one process and calls roles (distributed/launcher), which are in this process or in
several. Its state is a few counters and the current iteration (state.py). Both are in every checkpoint, so a run
stopped at any point resumes as if it had not been stopped.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from trimtab.algos.advantages import merge_moments
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.batches import SampleOrder
from trimtab.distributed.launcher import Group
from trimtab.errors import Interrupted, RunFailed
from trimtab.interrupts import StopRequest
from trimtab.train.alarms import diverged_line, resume_line
from trimtab.train.metrics import read_rows
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.files import Checkpoint, RunFiles
from trimtab.train.rl.micro_batches import MicroBatcher, TextMixture, all_mini_batches
from trimtab.train.rl.rl_proof import prove_rl
from trimtab.train.rl.roles import LayerCompilation
from trimtab.train.rl.rollout_client import Evaluation, RolloutClient
from trimtab.train.rl.source import RolloutSource, Sampled, prepare
from trimtab.train.rl.state import Counters, Iteration, Roles, UpdateTrial, row_of, timed
from trimtab.train.rl.teacher import TeacherPrompts, Teaching
from trimtab.train.rl.token_advantages import compute_advantages, penalties, trained
from trimtab.train.rl.weight_sync import LogProbCheck, SampleCheck, WeightSync
from trimtab.train.update import MicroBatchLimit


class RLRun:
    """An RL run: one iteration after another, with evaluation, checkpoints and recovery."""

    iteration_class = Iteration
    has_objective = True  # whether the checks before the first iteration know its advantages and loss

    def __init__(
        self,
        options: RLOptions,
        roles: Roles,
        client: RolloutClient,
        source: RolloutSource,
        order: SampleOrder,
        files: RunFiles,
        evaluation: Evaluation | None = None,
        text: TextMixture | None = None,
        teacher_prompts: TeacherPrompts | None = None,
    ):
        """`order`: the prompts over all epochs, one per step; `text`: pre-training text mixed into the updates;
        `teacher_prompts`: what the teacher reads, if not the policy's prompts."""
        self.options, self.roles, self.client, self.source = options, roles, client, source
        self.order, self.files, self.evaluation = order, files, evaluation
        self.counters = Counters(max(options.init_kl_coef, 0.0), entropy_coefficient=options.entropy_loss_coef or 0.0)
        self.iteration: Iteration | None = None
        self.reports: dict[str, Any] = {}  # on the data
        self.proved = False  # whether the checks before the first iteration have run
        self.batcher = MicroBatcher(options, larger_scoring=self.on_accelerator, text=text)
        self.teaching = Teaching(options, self.batcher, teacher_prompts) if options.is_taught else None
        if self.teaching is not None:
            self.teaching.use(roles.actor, roles.teacher)
        self.compilation = LayerCompilation(options, client.stores["train"], files)
        self.schedule()
        self.sample_check = SampleCheck(options, self.batcher, engine_exact=client.engine_exact)
        check = LogProbCheck(options, roles, client.stores["train"], self.batcher) if options.uses_vllm else None
        self.weight_sync = WeightSync(options, roles, source, check)
        self.weight_sync.connect()
        client.replace_engine = self.weight_sync.replace_engine

    # ---- one iteration

    def iterate(self, stop: StopRequest) -> dict | None:
        """Run one iteration and return its row of metrics. None: no useful prompt was left."""
        if self.iteration is None:
            self.iteration = self.begin(stop)
        work = self.iteration
        if work is None:
            return None
        self.before_updates(work, stop)
        for samples in self.mini_batches(work)[len(work.reports) :]:
            if stop.signal:
                self.leave(stop)
            with self.timed(work.seconds, "update"):
                self.update(work, samples)
        with self.timed(work.seconds, "sync") if self.options.uses_vllm else nullcontext():
            self.sync_weights()
        return self.finish(work, self.measure(work, stop))

    def begin(self, stop: StopRequest) -> Iteration | None:
        """Sample, score, and compute advantages."""
        self.compilation.check(self.roles)
        seconds: dict[str, float] = {}
        with self.timed(seconds, "rollout"):
            sampled = self.sample(stop)
        if sampled is None or stop.signal:
            self.leave(stop)
        experience, prompts, figures = sampled
        if experience is None:
            self.files.keep_places(self.counters.iteration + 1, self.source.settled())
            return None
        prepare(experience, figures, self.counters.iteration)
        with self.timed(seconds, "scoring"):
            self.sample_check.check_samples(experience, self.roles.actor)
            self.score(experience)
        figures |= self.compute_advantages(experience)
        return self.iteration_class(experience, prompts, figures, seconds=seconds)

    def before_updates(self, work: Iteration, stop: StopRequest) -> None:
        """Hook for methods that first train another model on the same prompts."""

    def sample(self, stop: StopRequest) -> Sampled | None:
        """Samples and their rewards. None: a stop was requested."""
        with self.roles.trainers_asleep(self.options):
            return self.source.next(self.counters.iteration, self.counters.prompts_used, stop)

    def score(self, experience: Experience) -> None:
        """Compute log-probs and values of the sampled tokens with the other models."""
        roles, fill = self.roles, self.batcher.fill
        sampled = self.teaching is not None and not self.options.teaches_vocabulary
        there = {"reference": roles.reference is not None, "teacher": sampled}
        # In an episode of several branches, later KL terms may be in another micro-batch.
        leaves_kl = self.leaves_kl_to_update and experience.branches_S is None
        if self.source.exact:
            experience.old_N = experience.sampled_N
        elif self.options.scores_old_policy(**there, leaves_kl=leaves_kl):
            # Engine and trainer round differently, so the ratio needs old log-probs from the trainer.
            fill(experience, "old_N", roles.actor, "log_probs")
        if roles.reference is not None:
            fill(experience, "reference_N", roles.reference, "log_probs")
        if self.teaching is not None:
            self.teaching.score(experience)
        if roles.critic is not None:
            fill(experience, "values_N", roles.critic, "values")
            if self.options.bootstrap_truncated:
                fill(experience, "after_N", roles.critic, "values", experience.cut_off_S, after=True)

    def compute_advantages(self, experience: Experience) -> dict[str, float]:
        """Compute advantages from rewards, and return the figures of both."""
        options, counters = self.options, self.counters
        if not options.running_reward_norm:
            return compute_advantages(experience, options, counters.kl_coefficient)
        rewards_E = experience.rewards_S[experience.firsts_E] - penalties(experience, options)
        counters.reward_moments = merge_moments(counters.reward_moments, rewards_E[experience.drawn_E])
        return compute_advantages(experience, options, counters.kl_coefficient, counters.reward_moments)

    def mini_batches(self, work: Iteration) -> list[list[int]]:
        """The samples of every update of an iteration."""
        return all_mini_batches(work.experience, self.options, self.counters.iteration)

    def update(self, work: Iteration, samples: list[int]) -> None:
        """One optimizer step of the critic and of the policy."""
        experience, reports, counters = work.experience, work.unfinished, self.counters
        samples = trained(experience, samples, self.options)
        if self.roles.critic is not None and "critic" not in reports:
            reports["critic"] = self.batcher.until_they_fit(lambda: self.update_critic(experience, samples))
            counters.critic_steps += 1
        if counters.iteration >= self.options.freezing_actor_steps:
            reports["actor"] = self.batcher.until_they_fit(lambda: self.update_actor(experience, samples))
            counters.actor_steps += 1
            if self.options.entropy_target is not None:
                counters.adapt_entropy(reports["actor"], self.options)
        for report in reports.values():
            counters.count(bool(report.pop("applied")))
        work.reports.append(reports)
        work.unfinished = {}

    def update_critic(self, experience: Experience, samples: list[int]) -> dict[str, float]:
        critic, step = self.roles.critic, self.counters.critic_steps
        assert critic is not None
        parts, totals = self.batcher.critic_update(critic, experience, samples)
        return self.batcher.send(critic, "update", parts, totals=totals, step=step)[0]

    def update_actor(self, experience: Experience, samples: list[int]) -> dict[str, float]:
        step, kl_coefficient = self.counters.actor_steps, self.counters.kl_coefficient
        teacher_ND = None if self.teaching is None else self.teaching.states(experience, samples)
        parts, totals = self.batcher.policy_update(self.roles.actor, experience, samples, step, teacher_ND)
        settings = {"totals": totals, "step": step, "kl_coefficient": kl_coefficient}
        settings["entropy_coefficient"] = self.counters.applied_entropy(self.options)
        return self.batcher.send(self.roles.actor, "update", parts, **settings)[0]

    def trials(self, few: Experience) -> list[UpdateTrial]:
        """An update of every trainer on these answers, for the checks before the first iteration."""
        samples, roles = list(range(len(few))), self.roles
        (slices, *_), totals = self.batcher.policy_update(roles.actor, few, samples, 0)
        settings = {"totals": totals, "kl_coefficient": self.counters.kl_coefficient}
        # Without old log-probs ratios are 1: a narrow clip would tell layouts apart that round otherwise.
        columns = [name for name in slices[0].columns if name != "old_N"]
        found = [UpdateTrial(roles.actor, few, columns, settings)]
        if roles.critic is not None:
            (slices, *_), totals = self.batcher.critic_update(roles.critic, few, samples)
            found.append(UpdateTrial(roles.critic, few, [*slices[0].columns], {"totals": totals}))
        return found

    def sync_weights(self) -> None:
        """Send the policy's weights to the engines. Their version is the number of iterations with all updates done."""
        work = self.iteration
        done = work is not None and len(work.reports) == len(self.mini_batches(work))
        self.weight_sync.sync(self.counters.iteration + done)

    def finish(self, work: Iteration, measured: dict[str, float]) -> dict:
        """Complete the iteration and return its row of metrics."""
        options, counters = self.options, self.counters
        counters.iteration += 1
        counters.prompts_used += work.prompts
        self.iteration = None
        # At the same time, so that a checkpoint from here on records the batch as trained.
        self.source.trained()
        self.files.keep_places(counters.iteration, self.source.settled())
        row = row_of(work, counters, options.async_staleness)
        row["epoch"] = round(counters.prompts_used / self.order.samples_per_epoch, 6)
        row |= self.batcher.limit.columns() | measured
        if self.roles.reference is not None:
            counters.adapt_kl(row, options, lacks_kl=work.experience.lacks_kl)
        self.files.keep_samples(counters.iteration, work.experience)
        self.files.time_line.add_engines(self.source.spans(), counters.iteration)
        memory = max(self.roles.actor.call("memory_gib"))
        clock = self.files.clock(work.seconds, row["tokens"], options.max_epochs, memory)
        return row | self.compilation.columns() | clock

    @property
    def on_accelerator(self) -> bool:
        return self.files.manifest["device_type"] != "cpu"

    @property
    def leaves_kl_to_update(self) -> bool:
        """Whether the KL to the reference is computed in the only update of an iteration, not before it."""
        updated = self.counters.iteration >= self.options.freezing_actor_steps
        return updated and self.options.leaves_kl_to_update(accelerator=self.on_accelerator)

    # ---- evaluation

    def measure_start(self, stop: StopRequest) -> dict[str, float]:
        """Evaluate the policy before its first update."""
        return {} if self.evaluation is None else self.evaluate(stop)

    def measure(self, work: Iteration, stop: StopRequest) -> dict[str, float]:
        """Evaluate if that is due after this iteration. The iteration is not counted yet: a run stopped here resumes
        with all updates done and the evaluation still to do."""
        every, done = self.options.eval_steps, self.counters.iteration + 1
        if self.evaluation is None or not (self.is_done(after=work) or (every > 0 and done % every == 0)):
            return {}
        with self.timed(work.seconds, "evaluation"):
            return self.evaluate(stop)

    def measure_end(self, stop: StopRequest) -> None:
        """Evaluate after the last iteration if that was not known to be the last, as the prompts of all later turns
        are retired or filtered out. Its row is written again, with the evaluation: of a step the last row counts."""
        (*_, last) = read_rows(self.files.folder / "metrics.jsonl") or [{}]
        if self.evaluation is not None and not self.is_done() and "eval_length" not in last:
            self.files.write(last | self.evaluate(stop))

    def evaluate(self, stop: StopRequest) -> dict[str, float]:
        assert self.evaluation is not None
        with self.source.paused(), self.weight_sync.averaged(self.sync_weights):
            figures = self.evaluation.run(self.client)
        if figures is None:
            self.leave(stop)
        assert self.evaluation.shown is not None
        self.files.keep_evaluation(self.counters.iteration + (self.iteration is not None), self.evaluation.shown)
        return figures

    # ---- the run

    def train(self, stop: StopRequest, *, rebuilt: bool = False) -> None:
        """Run to the end; `rebuilt`: continue with the current counters and iteration on rebuilt roles."""
        if not rebuilt and not self.proved:
            self.proved = True
            prove_rl(self, self.reports)
            if self.options.check_only:
                return
        with self.files.run_directory.locked():
            resumed = rebuilt or (self.resume() if self.options.load_checkpoint else False)
            if not rebuilt:
                self.compilation.decide(self.roles, stop)
            # Until the initial evaluation is done, a resumed run keeps no earlier row.
            begun = self.counters.iteration > 0 or self.counters.start_is_measured
            self.files.open(self.counters.iteration if begun else -1, self.roles, resumed=resumed)
            # The disk may have been full when this row was due.
            if resumed and not rebuilt and self.iteration is None:
                self.files.keep_places(self.counters.iteration, self.source.settled())
            self.run_iterations(stop)

    def run_iterations(self, stop: StopRequest) -> None:
        with self.files.saving_on_failure(self.checkpoint):
            if not self.counters.start_is_measured:
                if figures := self.measure_start(stop):
                    self.files.write({"step": 0, **figures})
                self.counters.start_is_measured = True
            while not self.is_done() and (row := self.iterate(stop)) is not None:
                self.sample_check.add_alarm(row)
                self.files.write(row)
                self.sample_check.check_row(row)
                if self.options.save_steps > 0 and self.counters.iteration % self.options.save_steps == 0:
                    self.save()
                if stop.signal and not self.is_done():
                    self.leave(stop)
            self.measure_end(stop)
            if (done := self.counters.iteration) < self.files.total:
                why = "the other turns' prompts were retired or filtered out"
                print(f"ended after {done} of {self.files.total} iterations: {why}", flush=True)
            self.conclude(stop)
            if self.counters.skipped_in_a_row:
                raise RunFailed(diverged_line(self.counters.skipped_in_a_row, "updates", self.files.folder))

    def conclude(self, stop: StopRequest) -> None:
        self.files.save_models(self.roles)

    def is_done(self, after: Iteration | None = None) -> bool:
        """Whether the run is complete now, or will be after the iteration `after`."""
        prompts, iterations = (after.prompts, 1) if after else (0, 0)
        spent = self.counters.prompts_used + prompts >= self.order.steps
        return spent or 0 < self.options.max_steps <= self.counters.iteration + iterations

    def schedule(self) -> None:
        """Set the trainers' learning-rate schedules to the number of optimizer steps."""
        steps = self.files.total * self.options.updates_per_iteration
        for role in self.roles.trainers:
            role.call("schedule", steps=steps)

    def use(self, groups: dict[str, Group]) -> None:
        """Continue with rebuilt roles, after one of several processes ran out of memory."""
        self.roles = type(self.roles)(**groups)
        self.client.use(self.roles.rollouts, self.roles.reward)
        if self.teaching is not None:
            self.teaching.use(self.roles.actor, self.roles.teacher)
        self.schedule()
        self.compilation.settle(self.roles)
        with self.source.paused():
            self.weight_sync.use(self.roles)
            self.sync_weights()
        self.source.rebuilt()

    @contextmanager
    def timed(self, seconds: dict[str, float], phase: str) -> Iterator[None]:
        with timed(seconds, phase), self.files.time_line.during(phase, self.counters.iteration + 1):
            yield

    # ---- checkpoints

    def save(self) -> Path | None:
        return self.files.save(self.checkpoint())

    def checkpoint(self) -> Checkpoint:
        tensors, work = {}, self.iteration
        state: dict[str, Any] = {"counters": vars(self.counters), "pass_limit": vars(self.batcher.limit)}
        state["compiled"] = self.compilation.decided
        if work is not None:
            tensors["experience"], state["iteration"] = work.on_disk()
        tensors["ahead"], ahead = self.source.state(in_hand=work is not None)
        if ahead is not None:
            state["ahead"] = ahead
        if self.source.pools is not None:
            tensors["difficulty"] = self.source.pools.state(in_hand=work is not None)
        return Checkpoint(self.counters.iteration, self.roles, tensors, state)

    def resume(self, *, ahead: bool = True) -> bool:
        """Load the newest checkpoint; False if there is none. `ahead`: also the untrained groups, which a source that
        is at work has."""
        found = self.files.load(self.roles)
        if found is None:
            return False
        tensors, state = found
        self.counters = Counters(**state["counters"])
        self.batcher.limit = MicroBatchLimit(**state.get("pass_limit", {}))
        self.compilation.decided = state.get("compiled", {})  # earlier versions compiled nothing
        if "iteration" in state:
            self.iteration = self.iteration_class.from_disk(tensors["experience"], state["iteration"])
        self.sync_weights()
        if self.source.pools is not None:
            self.source.pools.restore(tensors.get("difficulty", {}))
        if ahead and "ahead" in state:
            self.source.restore(tensors.get("ahead", {}), state["ahead"])
        return True

    def leave(self, stop: StopRequest) -> NoReturn:
        """Save a checkpoint and end the run because a stop was requested."""
        if self.options.check_only:
            raise Interrupted(stop.number, "stopped in the checks; nothing was written")
        where = resume_line(self.save())
        raise Interrupted(stop.number, f"stopped in iteration {self.counters.iteration + 1}: {where}")
