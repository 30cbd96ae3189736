"""Jobs: which groups of options each one takes, and the defaults it changes."""

import math
from collections.abc import Iterable
from dataclasses import fields
from types import MappingProxyType

from trimtab.config import data_options as data
from trimtab.config import inference_options as inference
from trimtab.config import objective_options as objective
from trimtab.config import placement_options as placement
from trimtab.config import rl_options as rl
from trimtab.config import training_options as training
from trimtab.config.data_options import listed
from trimtab.config.option import option
from trimtab.config.rl_jobs import (
    AnyRLOptions,
    DAPOOptions,
    GRPOOptions,
    PPOOptions,
    ReinforceOptions,
    RLOOOptions,
    RLOptions,
    TailOptions,
)
from trimtab.errors import UserError

_OF_GENERATION = (
    *("best_of_n", "max_new_tokens", "prompt_max_len", "greedy_sampling", "temperature", "top_p", "label_key"),
    *("repetition_penalty", "enable_csft", "iter", "tp_size", "max_num_seqs", "enable_prefix_caching"),
)
_OF_SCORING = ("output_key", "value_head_prefix", "max_len")
_OF_A_SERVED_MODEL = (
    *("normalize_reward", "value_head_prefix", "bf16", "load_in_4bit", "flash_attn", "attn_implementation"),
    *("disable_fast_tokenizer", "max_len", "placeholder_token"),
)
_OF_A_JUDGE = (
    *("reward_threshold", "rm_exclude_adv_suffix", "normalize_reward"),
    *("reward_input", "rm_max_len", "value_head_prefix"),
)


class Subject(training.ModelOptions, data.DataOptions):
    """What every training job starts from"""


class Training(
    training.BatchOptions,
    training.OptimiserOptions,
    training.LoraOptions,
    training.CheckpointOptions,
    training.LoggingOptions,
    placement.ShardingOptions,
    placement.RehearsalOptions,
    training.RunOptions,
):
    """How every supervised job is trained"""

    def check(self) -> Iterable[str]:
        budget = self.train_max_tokens_per_gpu
        if budget is None:
            return ()
        if not self.packing_samples:
            raise UserError("--train_max_tokens_per_gpu is the budget of packed rows: add --packing_samples")
        assert isinstance(self, data.LengthOptions), "every one has data"
        answers, sample = (2, "pair of two") if isinstance(self, data.PreferenceColumns) else (1, "sample of")
        if self.row_tokens(budget) < answers * self.max_len:
            least = math.ceil(answers * self.max_len / self.ring_attn_size)
            raise UserError(
                f"--train_max_tokens_per_gpu {budget} cannot hold one {sample} --max_len {self.max_len}: "
                f"raise it to {least} or more"
            )
        return ()


class SFTOptions(
    Subject,
    data.ConversationOptions,
    objective.TargetOptions,
    Training,
    training.AnswerOptions,
    verb="sft",
    max_epochs=2,
    input_template="User: {}\nAssistant: ",
):
    """Supervised fine-tuning"""


class RMOptions(
    Subject,
    data.PreferenceColumns,
    data.TemplateOptions,
    objective.RewardHeadOptions,
    objective.RewardLossOptions,
    Training,
    verb="rm",
    learning_rate=9e-6,
    micro_train_batch_size=1,
    max_len=512,
):
    """Reward model"""


class PRMOptions(
    Subject,
    data.InputColumn,
    data.LabelColumn,
    objective.StepRewardOptions,
    Training,
    verb="prm",
    learning_rate=1e-6,
    micro_train_batch_size=1,
    eval_split="test",
):
    """Process reward model"""


class DPOOptions(
    Subject,
    training.DropoutOptions,
    data.PreferenceColumns,
    data.TemplateOptions,
    objective.PreferenceLossOptions,
    objective.CachedReferenceOptions,
    Training,
    training.AnswerOptions,
    verb="dpo",
    learning_rate=1e-5,
    max_len=512,
    eval_split="test",
):
    """Preference optimisation"""


# OpenRLHF starts KTO from bigscience/bloomz-1b7 when no model is named. Here a model must be named.
class KTOOptions(
    Subject,
    training.DropoutOptions,
    data.ConversationOptions,
    data.LabelColumn,
    objective.UnpairedLossOptions,
    objective.ReferenceOptions,
    Training,
    training.AnswerOptions,
    verb="kto",
    learning_rate=1e-5,
    beta=0.01,
    eval_split="test",
    input_template="User: {}\nAssistant: ",
):
    """Kahneman-Tversky optimisation"""


class KDOptions(
    Subject,
    data.ConversationOptions,
    objective.TargetOptions,
    objective.DistillationOptions,
    Training,
    training.AnswerOptions,
    verb="kd",
    eval_split="test",
    output_key="output",
    input_template="User: {}\nAssistant: ",
):
    """Distillation"""


SupervisedOptions = SFTOptions | RMOptions | PRMOptions | DPOOptions | KTOOptions | KDOptions


class GenerateOptions(
    inference.TaskOptions,
    training.PretrainOptions,
    data.SourceOptions,
    data.CountOptions,
    data.PromptLengthOptions,
    data.LengthOptions,
    data.PromptColumns,
    data.OutputColumn,
    data.TemplateOptions,
    inference.AnswerLengthOptions,
    inference.DrawingOptions,
    data.EnvironmentOptions,
    inference.SelectionOptions,
    objective.RewardSourceOptions,
    objective.RewardHeadOptions,
    inference.PostProcessingOptions,
    inference.BatchEngineOptions,
    training.ProcessOptions,
    training.RunOptions,
    verb="generate",
    seed=1234,
    max_samples=100_000_000,
    output_key="output",
    value_head_prefix="value_head",
    zero_stage=0,
):
    """Answers to many prompts, and their scores"""

    def check(self) -> Iterable[str]:
        scoring = self.eval_task == "rm"
        self._check_rewards(scoring)
        yield from self.idle(_OF_GENERATION if scoring else _OF_SCORING, f"with --eval_task {self.eval_task}")
        if not scoring and self.rollout_engine == "vllm":
            self._check_vllm()
        elif not scoring and (self.eval_task == "generate_vllm" or self.tp_size is not None):
            yield "the built-in engine writes the answers; vLLM is not needed"
        if self.zero_stage > 0:
            yield f"--zero_stage {self.zero_stage} has no effect: every process holds the whole model"
        if not scoring and not self.reward_pretrain:
            yield from self.idle(["micro_batch_size"], "without a reward model")

    def _check_vllm(self) -> None:
        if self.nproc > 1:
            raise UserError(f"--rollout_engine vllm: one engine writes all answers; drop --nproc {self.nproc}")
        if self.load_in_4bit:
            raise UserError("--rollout_engine vllm takes no weights of 4 bits: drop --load_in_4bit, or use builtin")

    def _check_rewards(self, scoring: bool) -> None:
        rewards = {"reward_pretrain": self.reward_pretrain, "reward_func": self.reward_func}
        rewards |= {"remote_rm_url": self.remote_rm_url, "judge": self.judge}
        rewards |= {"agent_func_path": self.agent_func_path, "environment": self.environment}
        named = [f"--{name}" for name, value in (rewards | {"reward_verifier": self.reward_verifier}).items() if value]
        if scoring and named:
            raise UserError(f"with --eval_task rm the reward model is --pretrain: leave {', '.join(named)} out")
        if named and self.enable_csft:
            raise UserError(
                "--enable_csft: a reward would read the wish too; score the written answers with --eval_task rm"
            )
        if self.post_processor is None or scoring:
            return
        if not named:
            raise UserError(
                f"--post_processor {self.post_processor} needs rewards: name one (--reward_pretrain, --reward_func, "
                "--remote_rm_url, --judge or --reward_verifier), or score the written answers with --eval_task rm"
            )
        if self.post_processor != "csft" and self.best_of_n < 2:
            raise UserError(
                f"--post_processor {self.post_processor} compares the answers to a prompt: set --best_of_n above 1"
            )


class ChatOptions(
    training.PretrainOptions,
    data.LengthOptions,
    inference.PreambleOptions,
    data.TemplateOptions,
    inference.DrawingOptions,
    inference.ConditionOptions,
    training.RunOptions,
    verb="chat",
    max_len=4096,
    input_template="User: {}\nAssistant: ",
    temperature=0.2,
    top_p=0.9,
    repetition_penalty=1.2,
):
    """A conversation with a model"""


class PlayOptions(
    data.EnvironmentOptions,
    data.LookingOptions,
    training.PretrainOptions,
    data.SourceOptions,
    data.PromptColumns,
    data.TemplateOptions,
    inference.AnswerLengthOptions,
    inference.DrawingOptions,
    training.RunOptions,
    verb="play",
):
    """An environment, played by a person or a model and shown as training sees it"""

    idle_here = MappingProxyType(
        dict.fromkeys(("input_template", "apply_chat_template"), "here: a chat template is used where there is one")
        | dict.fromkeys(("env_workers", "env_rows"), "here: one process plays one episode after another")
    )

    def may_lack(self, name: str) -> bool:
        return name in ("pretrain", "dataset") or super().may_lack(name)

    def check(self) -> Iterable[str]:
        return () if self.pretrain else self.idle(["by_hand", "tokens", "greedy_sampling"], "without --pretrain")


class AttackOptions(
    training.PretrainOptions,
    training.BackwardOptions,
    inference.AttackedOptions,
    inference.TargetFileOptions,
    inference.SearchOptions,
    inference.AnswerLengthOptions,
    inference.SuccessOptions,
    objective.RewardInputOptions,
    objective.RewardScaleOptions,
    objective.RewardHeadOptions,
    training.ProcessOptions,
    training.RunOptions,
    verb="attack",
    max_new_tokens=20,
):
    """GCG attack"""

    idle_here = MappingProxyType(
        dict.fromkeys(training.BackwardOptions.__annotations__, "in an attack: nothing is trained")
        | dict.fromkeys(("zero_stage", "hang_timeout"), "in an attack: it runs in one process")
    )

    def check(self) -> Iterable[str]:
        if self.nproc > 1:
            raise UserError("--nproc: an attack runs in one process; start one for each part of --file_path")
        return () if self.reward_pretrain else self.idle(_OF_A_JUDGE, "without --reward_pretrain")


class LoraCombineOptions(objective.MergeOptions, training.PrecisionOptions, training.CallOptions, verb="lora-combine"):
    """Merge a LoRA adapter into its model"""


# A reward model has no steps to end, so the placeholder that a process reward model needs may be missing.
class ServeRMOptions(
    objective.ServedRewardOptions,
    objective.RewardScaleOptions,
    objective.RewardHeadOptions,
    objective.StepScoreOptions,
    training.LoadOptions,
    data.LengthOptions,
    training.PackingOptions,
    inference.RewardServerOptions,
    training.CallOptions,
    verb="serve-rm",
    placeholder_token=None,
):
    """Reward server"""

    idle_here = MappingProxyType({"packing_samples": "in a server: samples are always packed"})

    def check(self) -> Iterable[str]:
        if bool(self.reward_pretrain) == bool(self.reward_verifier):
            raise UserError("give one of --reward_pretrain (a model folder) and --reward_verifier (for example gsm8k)")
        names = listed(self.reward_pretrain)
        if self.placeholder_token is not None and len(names) != 1:
            raise UserError("--placeholder_token: give one process reward model as --reward_pretrain")
        if self.step_reward == "steps":
            raise UserError("--step_reward is steps: it must be min or last")
        if self.reward_verifier:
            return self.idle(_OF_A_SERVED_MODEL, "with --reward_verifier: no model is loaded")
        return self.idle(["value_head_prefix"], "with --placeholder_token") if self.placeholder_token else ()


class ServeOptions(
    training.PretrainOptions,
    data.ChatTemplateOptions,
    inference.PolicyServerOptions,
    training.RunOptions,
    verb="serve",
    port=8000,
    max_request_mib=32.0,
):
    """Policy server"""


TrainedOptions = Training | RLOptions
"""The options of any training job."""

TRAINED: dict[str, type[Training] | type[RLOptions]] = {
    **{job.verb: job for job in (SFTOptions, RMOptions, PRMOptions, DPOOptions, KTOOptions, KDOptions)},
    **{job.verb: job for job in (PPOOptions, GRPOOptions, DAPOOptions, ReinforceOptions, RLOOOptions)},
    **{job.verb: job for job in (AnyRLOptions, TailOptions)},
}
"""The training jobs by their verbs."""

JOBS: dict[str, type[training.CallOptions]] = {
    **TRAINED,
    **{job.verb: job for job in (GenerateOptions, ChatOptions, PlayOptions, AttackOptions)},
    **{job.verb: job for job in (LoraCombineOptions, ServeOptions, ServeRMOptions)},
}
"""Every job by its verb."""


# ---- the public Learner: no run, so no data, no schedule, no folder, and one process


_NOT_TAKEN = {
    *("compile", "aux_loss_coef", "flash_attn", "use_ms", "gradient_checkpointing_use_reentrant"),
    *("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio"),
    *(known.name for known in fields(placement.ShardingOptions)),
    *(known.name for known in fields(training.RunOptions)),
} - {"adam_offload", "grad_accum_dtype", "seed", "full_determinism"}


class LearnerOptions(
    training.ModelOptions,
    training.DropoutOptions,
    training.LoraOptions,
    training.OptimiserOptions,
    rl.EngineOptions,
    data.ChatTemplateOptions,
    placement.ShardingOptions,
    training.RunOptions,
    learning_rate=1e-6,
    seed=0,
):
    """Learner"""

    pass_tokens: int | None = option(None, at_least=1)
    """Tokens in one forward and backward pass; unset: 8192, and on a CPU 2048. It changes memory and speed, not the
    result; where passes do not fit, they are made smaller."""

    @classmethod
    def taken(cls) -> list[str]:
        """The names that a Learner takes, but for its model."""
        known = [known.name for known in fields(cls) if "no_option" not in known.metadata]
        return [name for name in known if name not in _NOT_TAKEN and name != "pretrain"]

    def may_lack(self, name: str) -> bool:
        return name == "pretrain" or super().may_lack(name)  # a module may be given

    def check(self) -> Iterable[str]:
        if self.plans_recomputation:
            raise UserError("--gradient_checkpointing_layers auto: only a run is planned; give a number")
        return ()
