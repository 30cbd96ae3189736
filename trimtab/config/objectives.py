"""Groups of options that say what is learnt, and against what: heads, losses, references, teachers.

Like groups.py, but each is about one job or a few close ones.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trimtab.config.groups import LoraOptions
from trimtab.config.option import Options, option, required
from trimtab.errors import UserError

REFERENCE_FREE = ("orpo", "simpo")


@dataclass(frozen=True, kw_only=True)
class TargetOptions(Options):
    """What is learnt"""

    multiturn: bool = False
    """Learn every assistant turn of a conversation, not only the last."""
    pretrain_mode: bool = False
    """Learn every token of the text and use no template (continued pre-training)."""

    def check(self) -> Iterable[str]:
        if self.multiturn and self.pretrain_mode:
            raise UserError("--multiturn learns the assistant's turns, --pretrain_mode every token: choose one")
        return self.idle(["input_template"], "with --pretrain_mode") if self.pretrain_mode else ()


@dataclass(frozen=True, kw_only=True)
class RewardHeadOptions(Options):
    """Reward head"""

    value_head_prefix: str = "score"
    """Name of the layer that turns a hidden state into a reward; under the name score the saved model loads with
    AutoModelForSequenceClassification."""

    def check(self) -> Iterable[str]:
        if not self.value_head_prefix.isidentifier():
            raise UserError(f"--value_head_prefix is {self.value_head_prefix!r}: it must be a name such as score")
        return ()


@dataclass(frozen=True, kw_only=True)
class RewardLossOptions(Options):
    """Loss"""

    loss: str = option("sigmoid", choices=("sigmoid", "logexp"))
    """Loss on the difference d of the two rewards: sigmoid is -log sigmoid(d), logexp is log(1 + exp(-d)):
    one function in two spellings."""
    margin_loss: bool = False
    """The chosen reward must exceed the other by what the column margin of the row says."""
    compute_fp32_loss: bool = option(False, always=True)
    """Take the rewards to float32 before the loss; that is how it is always done here."""


@dataclass(frozen=True, kw_only=True)
class StepRewardOptions(Options):
    """Step rewards"""

    placeholder_token: str | None = required("TOKEN", "the token that ends every step, for example ки")
    """Token that ends every step of an answer; what the model predicts there is the step's reward."""
    reward_tokens: tuple[str, ...] | None = option(None, needs="placeholder_token")
    """Tokens that stand for the labels, best first; the prediction is taken among these alone. With two of them a
    label may be a probability of the first."""

    def check(self) -> Iterable[str]:
        tokens = self.reward_tokens
        if tokens is not None and (len(tokens) < 2 or len(set(tokens)) < len(tokens)):
            raise UserError(f"--reward_tokens {' '.join(tokens)}: give two or more different tokens, best first")
        return ()


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions(Options):
    """Reference"""

    ref_pretrain: str | None = option(None, place="model")
    """Reference model; unset: the model itself as it was at the start (with LoRA: without its adapters)."""
    ref_offload: bool = False
    """Keep the reference's weights in main memory and bring them to the device to score."""

    def check(self) -> Iterable[str]:
        if not self.ref_pretrain and isinstance(self, LoraOptions) and self.lora_rank and self.asks("ref_offload"):
            return ["--ref_offload has no effect: with --lora_rank the reference is the model without its adapters"]
        return ()


@dataclass(frozen=True, kw_only=True)
class CachedReferenceOptions(ReferenceOptions):
    """Reference"""

    precompute_ref_log_probs: bool = False
    """Score all data with the reference once, before training, and keep the results on disk for the next run."""


@dataclass(frozen=True, kw_only=True)
class BetaOptions(Options):
    """Loss"""

    beta: float = option(0.1, above=0)
    """How strongly a difference in log-probability counts: the larger, the closer to the reference."""


@dataclass(frozen=True, kw_only=True)
class PreferenceLossOptions(BetaOptions):
    """Loss"""

    preference_loss: str = option("dpo", choices=("dpo", "ipo", "ipo_mean", *REFERENCE_FREE))
    """dpo; ipo (a squared loss with a finite goal); ipo_mean (the same of mean log-probabilities, so that the goal does
    not depend on lengths: TRL's ipo); orpo (odds ratio times beta, plus the NLL of the chosen answer); simpo (mean
    log-probabilities, beta 2 or more). The last two have no reference."""
    ipo: bool = False
    """The same as --preference_loss ipo."""
    label_smoothing: float = option(0.0, at_least=0, below=0.5)
    """Probability that a pair is labelled the wrong way round (cDPO)."""
    nll_loss_coef: float = option(0.0, at_least=0)
    """Weight of the chosen answer's mean NLL, added to the loss."""
    simpo_gamma: float = option(0.5, at_least=0, needs=("preference_loss", "simpo"))
    """Margin of simpo: -log sigmoid(beta x difference - gamma)."""

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        # Two spellings of one choice; whoever reads either must see it.
        if self.ipo and self.preference_loss == "dpo":
            changes["preference_loss"] = "ipo"
        elif self.preference_loss == "ipo":
            changes["ipo"] = True
        return ()

    def check(self) -> Iterable[str]:
        if self.ipo and self.preference_loss not in ("dpo", "ipo"):
            raise UserError(f"--ipo and --preference_loss {self.preference_loss} are two losses: choose one")
        loss = "ipo" if self.ipo else self.preference_loss
        if self.label_smoothing and loss != "dpo":
            raise UserError(f"--label_smoothing belongs to the dpo loss, not to {loss}: drop one of the two")
        for name in ("ref_pretrain", "ref_offload", "precompute_ref_log_probs"):
            if loss in REFERENCE_FREE and isinstance(self, CachedReferenceOptions) and self.changed(name):
                raise UserError(f"--preference_loss {loss} has no reference: drop --{name}")
        return ()


@dataclass(frozen=True, kw_only=True)
class UnpairedLossOptions(BetaOptions):
    """Loss"""

    desirable_loss_weight: float = option(1.0, at_least=0)
    """Weight of good answers."""
    undesirable_loss_weight: float = option(1.0, at_least=0)
    """Weight of bad answers."""

    def check(self) -> Iterable[str]:
        if not self.desirable_loss_weight and not self.undesirable_loss_weight:
            raise UserError(
                "--desirable_loss_weight and --undesirable_loss_weight are both 0: there is nothing to learn"
            )
        return ()


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(Options):
    """Teacher"""

    teacher_model: str = required("MODEL", "a hub name or a model folder with the same vocabulary", place="model")
    """Model to learn from: a hub name or a local folder, with the student's vocabulary."""
    teacher_offload: bool = False
    """Keep the teacher's weights in main memory and bring them to the device to score."""
    kd_coef: float = option(0.4, at_least=0, at_most=1)
    """Weight of the distance to the teacher; the data's own tokens have the rest, 1 - kd_coef."""
    kd_loss: str = option("forward_kl", choices=("forward_kl", "reverse_kl", "jsd"))
    """Distance to the teacher: forward_kl (cover all it says), reverse_kl (say nothing it would not), jsd."""
    jsd_beta: float = option(0.5, needs=("kd_loss", "jsd"))
    """Share of the teacher in jsd's mixture; towards 0 it behaves like forward_kl, towards 1 like reverse_kl."""

    def check(self) -> Iterable[str]:
        if not 0 < self.jsd_beta < 1:
            raise UserError(
                f"--jsd_beta is {self.jsd_beta:g}: it must be between 0 and 1; at the ends jsd is --kd_loss "
                "forward_kl or reverse_kl"
            )
        return () if self.kd_coef else ["--teacher_model has no effect with --kd_coef 0"]


@dataclass(frozen=True, kw_only=True)
class MergeOptions(Options):
    """Merge"""

    model_path: str = required("MODEL", "the model the adapter was trained on", place="model")
    """Model the adapter was trained on: a hub name or a local folder."""
    lora_path: str = required("ADAPTER", "the folder of the adapter", place="path")
    """The adapter: --save_path of a run with --lora_rank."""
    output_path: str = required("FOLDER", "a folder for the merged model")
    """Folder for the merged model, in Hugging Face form."""
    is_rm: bool = False
    """The model is a reward model: a sequence classifier with one score."""

    def check(self) -> Iterable[str]:
        places = {"model_path": self.model_path, "lora_path": self.lora_path, "output_path": self.output_path}
        real = {name: os.path.realpath(os.path.expanduser(place)) for name, place in places.items()}
        adapter, output = real["lora_path"], real.pop("output_path")
        if os.path.isdir(adapter) and not os.path.isfile(os.path.join(adapter, "adapter_config.json")):
            raise UserError(
                f"--lora_path {self.lora_path}: no adapter_config.json there; give the folder of an adapter"
            )
        for name, place in real.items():
            if output == place:
                raise UserError(f"--output_path is --{name}, which the merged model would replace: give another folder")
        if os.path.exists(output) and not os.path.isdir(output):
            raise UserError(f"--output_path {self.output_path} is a file: give a folder")
        if os.path.isdir(output) and os.listdir(output):
            return [f"--output_path {self.output_path} is not empty: files of the same names are replaced"]
        return ()
