"""Groups of options that say what is learnt, and against what: heads, losses, references, teachers.

Like groups.py, but each is about one job or a few close ones.
"""

from dataclasses import dataclass

from trimtab.config.groups import required


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What is learnt"""

    multiturn: bool = False
    """Learn every assistant turn of a conversation, not only the last."""
    pretrain_mode: bool = False
    """Learn every token of the text and use no template (continued pre-training)."""


@dataclass(frozen=True, kw_only=True)
class RewardHeadOptions:
    """Reward head"""

    value_head_prefix: str = "score"
    """Name of the layer that turns a hidden state into a reward; under the name score the saved model loads with
    AutoModelForSequenceClassification."""


@dataclass(frozen=True, kw_only=True)
class RewardLossOptions:
    """Loss"""

    loss: str = "sigmoid"
    """Loss on the difference d of the two rewards: sigmoid is -log sigmoid(d), logexp is log(1 + exp(-d)):
    one function in two spellings."""
    margin_loss: bool = False
    """The chosen reward must exceed the other by what the column margin of the row says."""
    compute_fp32_loss: bool = False
    """Take the rewards to float32 before the loss; that is how it is always done here."""


@dataclass(frozen=True, kw_only=True)
class StepRewardOptions:
    """Step rewards"""

    placeholder_token: str | None = required("TOKEN", "the token that ends every step, for example ки")
    """Token that ends every step of an answer; what the model predicts there is the step's reward."""
    reward_tokens: tuple[str, ...] | None = None
    """Tokens that stand for the labels, best first; the prediction is taken among these alone. With two of them a
    label may be a probability of the first."""


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """Reference"""

    ref_pretrain: str | None = None
    """Reference model; unset: the model itself as it was at the start (with LoRA: without its adapters)."""
    ref_offload: bool = False
    """Keep the reference's weights in main memory and bring them to the device to score."""


@dataclass(frozen=True, kw_only=True)
class CachedReferenceOptions(ReferenceOptions):
    """Reference"""

    precompute_ref_log_probs: bool = False
    """Score all data with the reference once, before training, and keep the results on disk for the next run."""


@dataclass(frozen=True, kw_only=True)
class BetaOptions:
    """Loss"""

    beta: float = 0.1
    """How strongly a difference in log-probability counts: the larger, the closer to the reference."""


@dataclass(frozen=True, kw_only=True)
class PreferenceLossOptions(BetaOptions):
    """Loss"""

    preference_loss: str = "dpo"
    """dpo; ipo (a squared loss with a finite goal); orpo (odds ratio times beta, plus the NLL of the chosen answer);
    simpo (mean log-probabilities, beta 2 or more). The last two have no reference."""
    ipo: bool = False
    """The same as --preference_loss ipo."""
    label_smoothing: float = 0.0
    """Probability that a pair is labelled the wrong way round (cDPO)."""
    nll_loss_coef: float = 0.0
    """Weight of the chosen answer's mean NLL, added to the loss."""
    simpo_gamma: float = 0.5
    """Margin of simpo: -log sigmoid(beta x difference - gamma)."""


@dataclass(frozen=True, kw_only=True)
class UnpairedLossOptions(BetaOptions):
    """Loss"""

    desirable_loss_weight: float = 1.0
    """Weight of good answers."""
    undesirable_loss_weight: float = 1.0
    """Weight of bad answers."""


@dataclass(frozen=True, kw_only=True)
class DistillationOptions:
    """Teacher"""

    teacher_model: str | None = required("MODEL", "a hub name or a model folder with the same vocabulary")
    """Model to learn from: a hub name or a local folder, with the student's vocabulary."""
    teacher_offload: bool = False
    """Keep the teacher's weights in main memory and bring them to the device to score."""
    kd_coef: float = 0.4
    """Weight of the distance to the teacher; the data's own tokens have the rest, 1 - kd_coef."""
    kd_loss: str = "forward_kl"
    """Distance to the teacher: forward_kl (cover all it says), reverse_kl (say nothing it would not), jsd."""
    jsd_beta: float = 0.5
    """Share of the teacher in jsd's mixture; towards 0 it behaves like forward_kl, towards 1 like reverse_kl."""


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """Merge"""

    model_path: str | None = required("MODEL", "the model the adapter was trained on")
    """Model the adapter was trained on: a hub name or a local folder."""
    lora_path: str | None = required("ADAPTER", "the folder of the adapter")
    """The adapter: --save_path of a run with --lora_rank."""
    output_path: str | None = required("FOLDER", "a folder for the merged model")
    """Folder for the merged model, in Hugging Face form."""
    is_rm: bool = False
    """The model is a reward model: a sequence classifier with one score."""
