"""The RL jobs: which groups of options they take, the defaults each changes, and what options of several groups say
together."""

import math
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, ClassVar

from trimtab.config import data_options as data
from trimtab.config import objective_options as objective
from trimtab.config import placement_options as placement
from trimtab.config import rl_options as rl
from trimtab.config import training_options as training
from trimtab.config.rl_options import METHODS
from trimtab.errors import UserError

DYNAMIC_BUDGET = 16_192
OF_EVALUATION = ("eval_max_samples", "eval_steps", "eval_temperature", "eval_n_samples_per_prompt")
OF_SAMPLING = (
    *("top_p", "no_shuffle", "vllm_generate_batch_size"),
    *("dynamic_filtering", "dynamic_filtering_rule", "dynamic_filtering_batches", "difficulty"),
)
OF_ALL_ANSWERS = (
    *("rollout_slots", "rollout_kv_tokens", "weight_only_int8"),
    *("repetition_penalty", "generate_min_len"),
)
"""In evaluation too."""
OF_THE_CRITIC = (
    *("critic_pretrain", "critic_learning_rate", "value_clip", "save_value_network", "lambd"),
    "micro_value_batch_size",
)
# Options of other RL jobs that would change what is sampled, or what a return is, unseen by the formulas of tail.
_OF_OTHER_METHODS = (
    *("temperature", "top_p", "weight_only_int8", "max_epochs", "gamma", "use_kl_loss", "kl_estimator", "kl_target"),
    *("dynamic_filtering", "difficulty", "overlong_buffer_len", "entropy_loss_coef", "entropy_target"),
    *("policy_loss_type", "no_advantage_std_norm"),
    *("eps_clip", "eps_clip_low_high", "dual_clip", "aux_loss_coef", "loss_reduction", "mismatch_correction"),
    *("teacher_model", "teacher_prompt_key", "teacher_prompt_func", "pretrain_data", "freezing_actor_steps"),
    *("repetition_penalty", "generate_min_len"),
    *("policy_loss_coef", "routing_replay", "kl_clip", "running_reward_norm", "mask_truncated", "bootstrap_truncated"),
)


# With --placeholder_token the reward model is a process reward model; it may be missing.
class RLOptions(
    rl.AsyncRunOptions,
    training.ModelOptions,
    training.DropoutOptions,
    data.PromptOptions,
    data.PromptColumns,
    data.TemplateOptions,
    rl.RolloutOptions,
    rl.EngineOptions,
    rl.AsyncOptions,
    data.AgentTrainingOptions,
    objective.RewardOptions,
    objective.RewardHeadOptions,
    objective.StepScoreOptions,
    rl.AdvantageOptions,
    rl.KLOptions,
    rl.PolicyLossOptions,
    rl.CriticOptions,
    data.PretrainMixOptions,
    objective.TeacherRewardOptions,
    rl.RecordingOptions,
    training.BatchOptions,
    rl.ActorOptions,
    training.LoraOptions,
    training.CheckpointOptions,
    rl.SamplingEvaluationOptions,
    placement.ShardingOptions,
    placement.ClusterOptions,
    placement.RehearsalOptions,
    training.RunOptions,
    max_samples=100_000_000,
    micro_train_batch_size=4,
    placeholder_token=None,
):
    """What every RL job has: they are one job with different defaults"""

    trainer: ClassVar[str] = "rl"

    idle_here = MappingProxyType({"max_len": "in RL: --prompt_max_len and --generate_max_len are the limits"})

    @property
    def token_budget_option(self) -> str | None:
        return "use_dynamic_batch" if self.use_dynamic_batch else None

    @property
    def longest_rollout(self) -> int:
        """Tokens of the longest prompt and the longest answer, or of the longest episode: at the latest the loop knows
        its length, from the model's context."""
        return (self.episode_max_len if self.plays else None) or self.prompt_max_len + self.generate_max_len

    @property
    def most_drawn(self) -> int:
        """Tokens that the policy draws in one answer or, turn by turn, in one episode, at the most."""
        if not self.plays:
            return self.generate_max_len
        turns = self.max_turns * self.generate_max_len
        return turns if self.episode_max_len is None else min(turns, self.episode_max_len)

    @property
    def measures(self) -> bool:
        """Whether there is anything to evaluate on."""
        own = self.plays and self.prompt_data is None and self.env_eval_rows
        return bool(self.eval_dataset or own)

    @property
    def groups_per_update(self) -> int:
        """Groups of one optimizer step. Groups of other sizes than --n_samples_per_prompt change its samples, not the
        number of steps."""
        return max(1, self.train_batch_size // self.n_samples_per_prompt)

    @property
    def updates_per_iteration(self) -> int:
        """Optimizer steps that one rollout of full size gives."""
        return self.max_epochs * -(-self.rollout_batch_size // self.groups_per_update)

    def scores_old_policy(self, *, reference: bool, teacher: bool, leaves_kl: bool) -> bool:
        """Whether the loop needs the policy's log-probs before the update: to compare them with a teacher's or a
        reference's (whether there is one), to choose tokens by, or to compare them with those after the first update.
        An only update computes its own."""
        own = self.updates_per_iteration > 1 or self.surrogate.chooses
        return own or teacher or (reference and not leaves_kl)

    def leaves_kl_to_update(self, *, accelerator: bool) -> bool:
        """Whether the update can compute the KL to the reference: as a loss, or where advantages are sums of rewards,
        of which it is one term. Dropout would be in it. A CPU gains little, and would round otherwise than before.
        Tokens that are chosen by their advantages need it before."""
        if self.surrogate.chooses or self.keep_dropout or self.lora_dropout > 0 or not accelerator:
            return False
        summed = not (self.estimator.critic or self.estimator.whitened)
        return self.use_kl_loss or summed

    @property
    def teacher_is_base(self) -> bool:
        """Whether the teacher is the policy without its adapters."""
        return self.lora_rank > 0 and self.teacher_model == self.pretrain

    @property
    def policy_processes(self) -> int:
        return self.processes if self.ray else len(self.ranks_of("actor", self.processes))

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        if self.use_dynamic_batch:
            least = math.ceil(self.longest_rollout / self.ring_attn_size)
            budget = self.train_max_tokens_per_gpu or max(DYNAMIC_BUDGET, least)
            changes["packing_samples"] = True
            changes["train_max_tokens_per_gpu"] = budget
            changes["rollout_max_tokens_per_gpu"] = self.rollout_max_tokens_per_gpu or budget
        if not self.enable_vllm_is_correction:
            return self._correction_of_engine(changes)
        if self.mismatch_correction is not None and not self.asks("mismatch_correction"):
            return ()  # settled before
        if self.mismatch_correction is not None:
            spelt = ("enable_vllm_is_correction", "vllm_is_truncated_threshold")
            return self.idle(spelt, "beside --mismatch_correction")
        changes["mismatch_correction"] = "tis"
        changes["mismatch_range"] = (0.0, self.vllm_is_truncated_threshold)
        return ()

    def _correction_of_engine(self, changes: dict[str, Any]) -> Iterable[str]:
        """Where what samples is never quite what is trained, tokens are weighed, unless that is switched off."""
        if self.mismatch_correction is not None or "mismatch_correction" in self.given:
            return
        if self.outlives_updates:
            what = "answers may be older than the policy that learns from them"
        elif self.uses_vllm:
            what = "vLLM's log-probs are not quite the trainer's"
        else:
            return
        changes["mismatch_correction"] = "tis"
        if "mismatch_range" not in self.given:
            changes["mismatch_range"] = (0.0, type(self).vllm_is_truncated_threshold)
        most = changes.get("mismatch_range", self.mismatch_range)[1]
        yield (
            f"{what}: tokens are weighed by their ratio, at most {most:g} (--mismatch_correction tis; None switches it "
            "off)"
        )

    def check(self) -> Iterable[str]:
        estimator = self.estimator
        if estimator.grouped and self.n_samples_per_prompt < 2:
            raise UserError(
                f"--advantage_estimator {estimator.name} compares the answers to one prompt: set "
                "--n_samples_per_prompt above 1"
            )
        if not estimator.steps and self.placeholder_token is not None and self.step_reward == "steps":
            raise UserError(
                f"--step_reward steps: --advantage_estimator {estimator.name} judges whole answers; use min or last"
            )
        if self.running_reward_norm and self.placeholder_token is not None and self.step_reward == "steps":
            raise UserError("--running_reward_norm: with --step_reward steps a step is scored; use min or last")
        if estimator.group == "standardised":
            why = f"with --advantage_estimator {estimator.name}: it standardises the rewards of each group"
            yield from self.idle(["running_reward_norm"], why)
        self._check_rewarded()
        if self.teacher_ema and self.is_taught and not self.enable_ema:
            raise UserError("--teacher_ema is the average that --enable_ema keeps: add it")
        if self.plays:
            yield from self._about_environments()
        if self.plays and self.episode_max_len is not None and self.episode_max_len < self.generate_max_len:
            raise UserError(
                f"--episode_max_len {self.episode_max_len} is less than --generate_max_len {self.generate_max_len}, "
                "which is of one turn"
            )
        if not self.plays and self.max_len is not None and self.max_len < self.longest_rollout:
            raise UserError(
                f"--max_len {self.max_len} is less than --prompt_max_len + --generate_max_len "
                f"({self.longest_rollout}): lower these instead"
            )
        self._check_overlong()
        if self.turn_reward == "returns" and self.surrogate.one_advantage:
            raise UserError(
                f"--turn_reward returns: --policy_loss_type {self.policy_loss_type} has one advantage a sequence; use "
                "ppo or cispo"
            )
        self._check_budget("train_max_tokens_per_gpu", self.train_max_tokens_per_gpu)
        self._check_budget("rollout_max_tokens_per_gpu", self.rollout_max_tokens_per_gpu)
        yield from self._about_the_critic()
        yield from self._about_vllm()
        yield from self._about_placement()
        yield from self._about_steps()
        yield from self._about_packing()
        yield from self._about_what_is_not_there()

    def _about_environments(self) -> Iterable[str]:
        if self.prompt_data is None and self.eval_dataset:
            raise UserError("--eval_dataset: the environment brings the prompts; evaluate with --env_eval_rows")
        if self.outlives_updates and self.async_timeout <= self.env_timeout:
            raise UserError(
                f"--async_timeout {self.async_timeout:g} would end the run while an environment is within its "
                f"--env_timeout {self.env_timeout:g}: give {10 * self.env_timeout:g}"
            )
        if self.prompt_data is not None:
            yield from self.idle(["env_eval_rows"], "where prompts are given: give --eval_dataset")

    def _check_rewarded(self) -> None:
        if self.rehearse or self.plays or self.named_rewards:
            return
        name_one = "set --reward_pretrain, --reward_func, --remote_rm_url, --judge or --reward_verifier"
        if not self.is_taught and not self.replay:
            if self.teacher_divergence != "sampled":
                return  # there is no teacher, which is said elsewhere
            raise UserError(f"nothing gives rewards: {name_one}")
        if self.eval_dataset:
            raise UserError(f"--eval_dataset needs a reward to measure with: {name_one}, or leave it out")
        for name in ("dynamic_filtering", "difficulty"):
            if getattr(self, name) and not self.replay:
                raise UserError(f"--{name} needs a reward to judge groups by: {name_one}, or leave it out")

    def _check_overlong(self) -> None:
        if self.overlong_buffer_len is None:
            return
        name = "episode_max_len" if self.plays else "generate_max_len"
        longest = getattr(self, name)
        if longest is None:
            raise UserError(f"--overlong_buffer_len is the end of what an episode may have: set --{name}")
        if self.overlong_buffer_len > longest:
            raise UserError(f"--overlong_buffer_len {self.overlong_buffer_len:g} is more than --{name} {longest}")

    def _check_budget(self, name: str, budget: int | None) -> None:
        if budget is None:
            return
        if not self.use_dynamic_batch:
            raise UserError(f"--{name} is the token budget of a pass: add --use_dynamic_batch")
        if self.row_tokens(budget) < self.longest_rollout:
            raise UserError(
                f"--{name} {budget} cannot hold one sample of --prompt_max_len + --generate_max_len "
                f"{self.longest_rollout}: raise it"
            )

    def _about_the_critic(self) -> Iterable[str]:
        estimator = self.estimator
        if estimator.critic:
            if self.bootstrap_truncated and self.mask_truncated:
                yield "--bootstrap_truncated without effect: --mask_truncated learns nothing from what was cut off"
            return
        if self.freezing_actor_steps > 0:
            raise UserError(f"--freezing_actor_steps trains the critic alone, and {estimator.name} has none: drop it")
        if self.bootstrap_truncated:
            raise UserError(f"--bootstrap_truncated asks the critic, and {estimator.name} has none: drop it")
        if names := [f"--{name}" for name in OF_THE_CRITIC if self.asks(name)]:
            yield f"{', '.join(names)} without effect: --advantage_estimator {estimator.name} has no critic"

    @property
    def not_compiled(self) -> str | None:
        return "--routing_replay on" if self.routing_replay == "on" else super().not_compiled

    def _about_vllm(self) -> Iterable[str]:
        if self.routing_replay == "on" and not self.uses_vllm and not self.replay:
            raise UserError(
                "--routing_replay on: the built-in engine chooses experts as the trainer does and records none; drop "
                "it, or use --rollout_engine vllm"
            )
        if self.routing_replay == "on" and self.exact == "on":
            raise UserError("--routing_replay on does not work with --exact on: leave one of them out")
        if self.exact == "on" and self.weight_only_int8:
            raise UserError("--exact on does not work with --weight_only_int8: leave one of them out")
        if not self.uses_vllm:
            return
        if self.exact == "on":
            raise UserError(
                "--exact on: vLLM uses other kernels than the trainer; drop it, or use --rollout_engine builtin"
            )
        if self.load_in_4bit:
            raise UserError("--rollout_engine vllm takes no weights of 4 bits: drop --load_in_4bit, or use builtin")
        if names := [f"--{name}" for name in ("rollout_kv_tokens", "weight_only_int8") if self.asks(name)]:
            yield f"{', '.join(names)} without effect: they belong to the built-in engine"
        if names := [f"--{name}" for name in ("top_p", "repetition_penalty", "generate_min_len") if self.changed(name)]:
            yield (
                f"{', '.join(names)}: vLLM's log-probs are of what is drawn from then, and so is the gap to the "
                "trainer's"
            )

    def _about_placement(self) -> Iterable[str]:
        """With --ray, of models that are not there."""
        absent = {
            "critic": f"--advantage_estimator {self.estimator.name} has no critic" if not self.estimator.critic else "",
            "reward": "there is no --reward_pretrain" if not self.reward_pretrain else "",
            "ref": self._without_reference(),
        }
        for role, why in absent.items():
            if self.ray and why:
                yield from self.idle([f"{role}_num_gpus_per_node"], f"with --ray: {why}")

    def _without_reference(self) -> str:
        """Why no model is placed by the reference's options, if none is."""
        apart = self.teacher_model and not self.teacher_is_base
        if apart or (self.init_kl_coef > 0 and not self.lora_rank):
            return ""
        return "with --lora_rank the reference is the policy" if self.init_kl_coef > 0 else "--init_kl_coef is 0"

    def _about_packing(self) -> Iterable[str]:
        return self.idle(["packing_samples"], "in RL: samples are always packed")

    def _about_what_is_not_there(self) -> Iterable[str]:
        if not self.measures:
            yield from self.idle(OF_EVALUATION, "without --eval_dataset")
        if not self.reward_pretrain and not self.estimator.critic:
            yield from self.idle(["value_head_prefix"], "without a reward model or a critic")
        if not self.reward_pretrain:
            yield from self.idle(["micro_reward_batch_size"], "without --reward_pretrain")
        if self.asks("ref_reward_offload"):
            yield from self._about_offload()
        if self.replay:
            idle = OF_SAMPLING if self.measures else (*OF_SAMPLING, *OF_ALL_ANSWERS)
            if names := [f"--{name}" for name in idle if self.asks(name)]:
                yield f"{', '.join(names)} without effect: --replay samples nothing"

    def _about_offload(self) -> Iterable[str]:
        frozen = self.reward_pretrain or self.teacher_model or (self.init_kl_coef > 0 and not self.lora_rank)
        if not frozen:
            yield "--ref_reward_offload has no effect: there is no frozen model to keep in main memory"

    def _about_steps(self) -> Iterable[str]:
        """An iteration's samples are cut into optimiser steps of whole groups."""
        group, wanted = self.n_samples_per_prompt, self.train_batch_size
        samples = self.rollout_batch_size * group
        step = max(1, wanted // group) * group
        if samples < wanted:
            yield f"an iteration has {samples} samples, fewer than --train_batch_size {wanted}: they make one step"
        elif samples > wanted != step:
            yield f"a step has {step} samples, not --train_batch_size {wanted}: groups of {group} stay whole"
        elif samples > wanted and samples % step:
            yield f"the last step of an iteration has {samples % step} samples, not --train_batch_size {wanted}"


class PPOOptions(RLOptions, verb="ppo"):
    """Proximal policy optimisation"""


class AnyRLOptions(RLOptions, verb="rl"):
    """RL as a config file says"""


# The KL as a k3 loss with weight 0.001 is what both OpenRLHF's and PaddleNLP's GRPO recipes have.
class GRPOOptions(
    RLOptions,
    verb="grpo",
    advantage_estimator="group_norm",
    n_samples_per_prompt=8,
    use_kl_loss=True,
    kl_estimator="k3",
    init_kl_coef=1e-3,
):
    """Group relative policy optimisation"""


# Clip higher, no KL, the mean over tokens, and groups that teach nothing sampled again.
class DAPOOptions(
    RLOptions,
    verb="dapo",
    advantage_estimator="group_norm",
    n_samples_per_prompt=8,
    eps_clip_low_high=(0.2, 0.28),
    init_kl_coef=0.0,
    dynamic_filtering=True,
):
    """GRPO with DAPO's settings"""


class ReinforceOptions(RLOptions, verb="reinforce", advantage_estimator="reinforce"):
    """REINFORCE++"""


class RLOOOptions(RLOptions, verb="rloo", advantage_estimator="rloo", n_samples_per_prompt=8):
    """REINFORCE leave-one-out"""


# The defaults are those of the smaller of RePULSe's two experiments with real models.
class TailOptions(
    RLOptions,
    objective.RewardInputOptions,
    rl.TailMethodOptions,
    rl.ProposalOptions,
    rl.TailMeasureOptions,
    verb="tail",
    rollout_batch_size=50,
    n_samples_per_prompt=5,
    generate_max_len=20,
    micro_rollout_batch_size=250,
    train_batch_size=250,
    micro_train_batch_size=250,
    advantage_estimator="rloo",
    init_kl_coef=0.2,
    lambd=0.95,
    value_clip=0.2,
    reward_clip_range=(-1e6, 1e4),  # a transformed reward may be very low
    actor_learning_rate=3e-5,
    critic_learning_rate=3e-5,
    lr_scheduler="constant",
    adam_betas=(0.9, 0.999),
):
    """Rare bad answers made rarer"""

    trainer: ClassVar[str] = "tail"

    idle_here = MappingProxyType(
        {"max_failed_rewards": "in tail: its estimates need every answer, so a failure ends it"}
    )

    @property
    def failed_reward_share(self) -> float:
        return 0.0

    @property
    def adapts(self) -> bool:
        return self.lora_rank > 0 or self.proposal_lora_rank > 0

    def _without_reference(self) -> str:
        compared = self.evaluate_heldout_sampling and not self.lora_rank  # with the policy as it was
        return "" if compared else super()._without_reference()

    def _about_packing(self) -> Iterable[str]:
        # With it, passes may hold parts of a group.
        return () if self.micro_train_batch_size % self.n_samples_per_prompt else super()._about_packing()

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        """What the method decides."""
        if self.method not in METHODS:
            return ()  # check refuses it
        estimator = "gae" if self.method == "ppo" else "rloo"
        if self.changed("advantage_estimator") and self.advantage_estimator != estimator:
            raise UserError(
                f"--advantage_estimator {self.advantage_estimator}: --method decides that here; leave it out"
            )
        changes["advantage_estimator"] = estimator
        if self.save_negdata and self.bad_threshold is not None and "save_negdata_threshold" not in self.given:
            changes["save_negdata_threshold"] = self.bad_threshold
        if self.method == "ppo" and self.critic_pretrain is None:
            changes["critic_pretrain"] = self.pretrain  # not the reward model: critic and policy start alike
        if self.method == "ppo" and self.loss_reduction is None:
            changes["loss_reduction"] = "answer"  # as in the other methods, with their default
        return ()

    def check(self) -> Iterable[str]:
        method, group = self.method, self.n_samples_per_prompt
        if self.plays:
            raise UserError(f"{self.environment_flag}: tail methods learn from single answers; leave it out")
        if self.async_train:
            raise UserError("--async_train: tail methods learn from the policy's own new answers; leave it out")
        if self.uses_vllm:
            raise UserError("--rollout_engine vllm: tail methods need the policy's own log-probs; use builtin")
        for name in ("ds_tensor_parallel_size", "ring_attn_size"):
            if getattr(self, name) > 1:
                raise UserError(f"--{name}: tail methods split no layers and no rows yet; leave it at 1")
        if self.enable_ema:
            raise UserError("--enable_ema: the average would be saved and the last weights measured; leave it out")
        if self.placeholder_token is not None and self.step_reward == "steps":
            raise UserError("--step_reward steps: a tail method judges whole answers; use min or last")
        if method == "ppo":
            return self.idle(("proposal", "proposal_loss", "proposal_learning_rate"), "with --method ppo")
        if group < 2:
            raise UserError(
                f"--n_samples_per_prompt {group}: --method {method} weighs answers to one prompt against each "
                "other; set it above 1"
            )
        for name in _OF_OTHER_METHODS:
            if self.changed(name):
                raise UserError(f"--{name} has no place in --method {method}: leave it out")
        answers = self.rollout_batch_size * group
        if self.train_batch_size != answers:
            raise UserError(
                f"--train_batch_size {self.train_batch_size}: --method {method} makes one step of each rollout, which "
                f"is --rollout_batch_size x --n_samples_per_prompt = {answers}"
            )
        if self.micro_train_batch_size % group and not self.packing_samples:
            raise UserError(
                f"--micro_train_batch_size {self.micro_train_batch_size} splits the {group} answers to a prompt: use a "
                f"multiple of {group}, or --packing_samples"
            )
        for name in ("proposal_updates", "proposal_lora_rank"):
            if method != "repulse" and self.changed(name):
                raise UserError(f"--{name}: --method {method} has no proposal; leave it out")
        return ()
