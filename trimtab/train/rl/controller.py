"""What runs the loop: options, prompts, their order, counters and files, and no model. What it must know of the models
it asks their roles."""

import dataclasses
from typing import Any

from trimtab.config.jobs import RLOptions
from trimtab.data.order import SampleOrder
from trimtab.data.prompts import PromptStore
from trimtab.distributed.device import Device
from trimtab.distributed.launcher import Group, Unit
from trimtab.distributed.process_group import World
from trimtab.distributed.supervision import pulse
from trimtab.models.load import fake_policy
from trimtab.plan.micro_batches import (
    default_line,
    for_manifest,
    passes_of,
    uses_default_tokens,
    with_planned_passes,
    without_tokens,
    work_of_prompts,
)
from trimtab.rewards.build import check_columns, describe_rewards
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.launch import load_job_tokenizer, notes
from trimtab.train.manifest import make_manifest, settings
from trimtab.train.rl.asking import Asking
from trimtab.train.rl.asynchronous.supply import Ahead
from trimtab.train.rl.checks import (
    check_drop_last,
    check_model,
    check_places,
    check_shares,
    check_teacher,
    critic_start,
)
from trimtab.train.rl.description import units_of
from trimtab.train.rl.evaluation import Evaluation
from trimtab.train.rl.files import RunFiles
from trimtab.train.rl.loop import RLRun
from trimtab.train.rl.playing import contents_of_environment, load_stores
from trimtab.train.rl.recording import Recording
from trimtab.train.rl.role_groups import Roles
from trimtab.train.rl.supply import Recorded, Replayed, SampledNow, Supply, order_of_prompts
from trimtab.train.rl.text import TextMixture, load_text


class Controller:
    """Everything up to the first step that needs no weights; then the run over the groups of its roles."""

    def __init__(self, options: RLOptions, device: Device, world: World):
        """`device`: of this process, which is planned for where it does everything."""
        check_shares(options, self.units(options, world.size))
        check_places(options)
        self.tokenizer = load_job_tokenizer(options)
        self.options, self.world = options, world
        self.stores, self.reports = self._prompts()
        check_columns(self.stores, options)
        store = self.stores["train"]
        self.order = order_of_prompts(len(store), options, self.episodes())
        check_drop_last(self.order, options)
        self.iterations = iterations_of(self.order, options)
        self.recording = Recording.of(options, store)
        if options.replay:
            assert self.recording is not None
            self.recording.check_holds(self.order.steps, self.iterations)
            if line := self.recording.outlived(options):
                world.say(line)
        self.check_models()
        self.options, self.memory_plan = with_planned_passes(
            options, device, world, lambda: work_of_prompts(options, self.stores)
        )
        self.default_tokens = uses_default_tokens(options, device)
        if not options.ray:  # else the devices are elsewhere
            for line in notes(options, device):
                world.say(line)

    @staticmethod
    def units(options: Any, processes: int) -> list[Unit]:
        """The description of the run, the same in every process."""
        return units_of(options, processes)

    def episodes(self) -> int:
        return self.options.num_episodes

    def load_stores(self) -> tuple[dict[str, PromptStore], dict[str, Any]]:
        return load_stores(self.options, self.tokenizer)

    def check_models(self) -> None:
        check_model(fake_policy(self.options), self.options, self.stores)
        if self.options.teacher_model:
            check_teacher(self.options, self.tokenizer)
        if self.options.estimator.critic:
            _, note = critic_start(self.options, self.tokenizer)
            if note:
                self.world.say(note)

    def _prompts(self) -> tuple[dict[str, PromptStore], dict[str, Any]]:
        with pulse.waiting():  # reading the data takes as long as there are data
            stores, reports = self.load_stores()
        self.text = None
        if self.options.pretrain_data:
            self.text, reports["text"] = load_text(self.options, self.tokenizer)
        for report in reports.values():
            for line in report.lines():
                self.world.say(line)
        return stores, reports

    # ---- the run

    def run(self, groups: dict[str, Group], placed: dict[str, Any] | None = None) -> RLRun:
        """`placed`: what there is to keep of where the roles are."""
        actor = groups["actor"].call("describe")[0]
        if self.default_tokens:
            if actor["path"] != "packed":
                self.options = without_tokens(self.options)
            elif self.options.use_dynamic_batch:  # a run of an earlier version goes on without
                self.world.say(default_line(self.options))
        options = self.options
        fewer = {name: group for name, group in groups.items() if len(group.ranks) < self.world.size}
        if fewer and not options.ray:
            told = (f"{name} in {len(group.ranks)}" for name, group in fewer.items())
            self.world.say(f"of {self.world.size} processes: {', '.join(told)}")
        for line in actor["notes"]:
            self.world.say(line)
        if options.deepspeed_enable_sleep and actor["device"]["device_type"] == "cpu":
            self.world.say("--deepspeed_enable_sleep has no effect here: what learning needs is in main memory anyway")
        sampling = SamplingParams(
            max_new_tokens=options.generate_max_len,
            n=options.n_samples_per_prompt,
            temperature=options.temperature,
            top_p=options.top_p,
            min_new_tokens=options.generate_min_len,
            repetition_penalty=options.repetition_penalty,
            stop_token_ids=tuple(actor["stop_token_ids"]),
        )
        evaluation = None
        if "evaluation" in self.stores:
            eval_sampling = dataclasses.replace(
                sampling, n=options.eval_n_samples_per_prompt, temperature=options.eval_temperature, top_p=1.0
            )
            evaluation = Evaluation(self.stores["evaluation"], eval_sampling)
        text = None if self.text is None else TextMixture(self.text, options)
        asking = Asking(self.stores, self.tokenizer, groups["rollouts"], groups.get("reward"))
        self.world.say(f"reward: {describe_rewards(asking.in_words, options)}")
        manifest = self.manifest(actor, asking.weighing.name) | (placed or {})
        if self.recording is not None:
            self.recording.sampler = {name: manifest[name] for name in ("device_type", "dtype")}
            self.recording.sampler |= {"exact": asking.exact and not options.outlives_updates}
        return self.make_run(groups, asking, self.supply(sampling, asking), sampling, manifest, evaluation, text)

    def supply(self, sampling: SamplingParams, asking: Asking) -> Supply:
        if self.options.replay:
            assert self.recording is not None
            return Replayed(self.recording, asking)
        supply: Supply
        if self.options.outlives_updates:
            supply = Ahead(self.options, self.order, sampling, asking, self.iterations)
        else:
            supply = SampledNow(self.options, self.order, sampling, asking)
        return supply if self.recording is None else Recorded(supply, self.recording)

    def make_run(
        self,
        groups: dict[str, Group],
        asking: Asking,
        supply: Supply,
        sampling: SamplingParams,
        manifest: dict,
        *more: Any,
    ) -> RLRun:
        files = RunFiles(self.options, manifest, self.tokenizer, self.iterations, self.stores)
        return RLRun(self.options, Roles(**groups), asking, supply, self.order, files, *more)

    def manifest(self, actor: dict[str, Any], reward: str) -> dict:
        """`actor`: what the policy's role says of itself."""
        options = self.options
        return make_manifest(
            job=options.verb,
            weights=actor["weights"],
            data_order=self.order.fingerprint(self.stores["train"].fingerprint),
            seed=options.seed,
            dtype="bfloat16" if options.bf16 else "float32",
            device=actor["device"],
            path=actor["path"],
            model=options.pretrain,
            trainable=actor["trainable"],
            parameters=actor["parameters"],
            trainable_parameters=actor["trainable_parameters"],
            steps=self.iterations,
            settings=settings(options),
            processes=self.world.size,
            zero_stage=options.zero_stage,
            reward=reward,
            data={name: report.as_dict() for name, report in self.reports.items()},
            **contents_of_environment(options),
            passes=passes_of(options, packed=True),
            **for_manifest(self.memory_plan),
        )


def iterations_of(prompts: SampleOrder, options: RLOptions) -> int:
    whole = -(-prompts.steps // options.rollout_batch_size)
    return min(whole, options.max_steps) if options.max_steps > 0 else whole
