"""Groups of options of the tail job: the method, the proposal it may learn, and what is measured.

Like groups.py. Methods that lower the probability of rare bad answers (RePULSe, Zhao et al. 2025) and their baselines;
the original's own flags are translated in repulse_spelling.py.
"""

from dataclasses import dataclass

METHODS = ("ppo", "reinforce", "reinforce_transform", "base_proposal", "repulse")
PUSHING = ("base_proposal", "repulse")
"""Methods that lower the probability of a target's answers, beside raising the reward."""
MODULATIONS = ("modulation_model", "modulation_linear_head", "modulation_nn_head")

# Swear words in several spellings, in GPT-2's vocabulary.
GPT2_BAD_TOKENS = (
    *(5089, 9372, 20654, 25617, 30998, 31699, 34094, 46733, 21551, 40267),
    *(7510, 16211, 20041, 32574, 41356, 31030, 47209, 18185, 29836),
)


@dataclass(frozen=True, kw_only=True)
class TailMethodOptions:
    """Rare bad answers"""

    method: str = "repulse"
    """ppo; reinforce; reinforce_transform (a reward that punishes bad answers harder); base_proposal (the worst of the
    policy's own answers are pushed down); repulse (what a learnt proposal finds is)."""
    target_dist_beta: float = -10.0
    """Beta below 0: bad answers are samples of policy(answer) exp(beta reward). Of reinforce_transform the exponent."""
    alpha: float = 0.1
    """How hard bad answers are pushed down. Of reinforce_transform the weight of its punishment."""
    push_down_scale: str = "per_sample"
    """per_sample divides --alpha by the answers of a group, as the original does; per_group does not."""
    token_reduction: str = "token_mean"
    """token_mean: an answer counts with its mean log-probability, as in the original; token_sum: with its whole one,
    so that long and short answers follow the same objective."""
    reward_transform: str = "minus_alpha_exp_beta_r"
    """Of reinforce_transform: minus_alpha_exp_beta_r, or minus_alpha_ind, which subtracts --alpha from bad answers."""
    bad_threshold: float | None = None
    """Answers with a reward below this are bad: their share is measured."""
    reinforce_baseline_type: str = "expectation"
    """What a return is compared with: expectation (the mean of its group's other ones), hardcoded or none."""
    reinforce_hardcoded_baseline: float = 0.0
    """The constant of hardcoded."""


@dataclass(frozen=True, kw_only=True)
class ProposalOptions:
    """Proposal of repulse"""

    proposal: str = "model"
    """model: a language model of its own, started from --pretrain; modulation_model, modulation_linear_head,
    modulation_nn_head: the policy times what a model, or a head on its hidden states, has learnt."""
    proposal_lora_rank: int = 0
    """Above 0 the proposal is adapters of this rank on the policy's own weights: no second model is held."""
    proposal_loss: str = "ctl"
    """ctl (contrastive twist learning), or ctl_nosecondterm, which leaves out the term that takes away noise."""
    proposal_learning_rate: float = 3e-5
    """Peak learning rate of the proposal."""
    proposal_updates: int = 1
    """Updates of the proposal for each one of the policy, every one on answers of its own."""


@dataclass(frozen=True, kw_only=True)
class TailMeasureOptions:
    """Measurements"""

    save_info_path: str | None = None
    """Folder of the metric files, in the original's layout and under its names; unset: --save_path."""
    fit_steps: int = 1
    """Repeat the whole training this many times, and measure after each."""
    single_prompt: str | None = None
    """Use this text in place of every prompt."""
    analytic_bad_word_calc: bool = False
    """Measure the exact probability that an answer to --single_prompt holds a bad token. For very short answers."""
    bad_token_ids: tuple[int, ...] | None = None
    """The bad tokens; unset: swear words of GPT-2's vocabulary."""
    evaluate_heldout_sampling: bool = False
    """After training answer the held-out prompts, and keep every reward."""
    heldout_prompt_data: str | None = None
    """Held-out prompts, as --prompt_data."""
    heldout_input_key: str | None = None
    """Column that holds them; unset: --input_key."""
    sampling_iters: int = 1
    """Passes over the held-out prompts."""
    save_negdata: bool = False
    """Keep the distinct texts that were sampled in training with a reward below the next option."""
    save_negdata_threshold: float = -5.0
    """The reward below which a text is kept; not given: --bad_threshold, if that is."""
    negdata_path: str | None = None
    """Folder of the file of these texts; unset: --save_info_path."""
