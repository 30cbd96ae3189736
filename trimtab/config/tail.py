"""Groups of options of the tail job: the method, the proposal it may learn, and what is measured.

Like groups.py. Methods that lower the probability of rare bad answers (RePULSe, Zhao et al. 2025) and their baselines;
the original's own flags are translated in repulse_spelling.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.config.option import Options, option
from trimtab.config.sources import check_sources
from trimtab.errors import UserError

METHODS = ("ppo", "reinforce", "reinforce_transform", "base_proposal", "repulse")
PUSHING = ("base_proposal", "repulse")
"""Methods that lower the probability of a target's answers, beside raising the reward."""
OF_METHODS = {
    **dict.fromkeys(("push_down_scale", "start_alpha", "start_target_dist_beta"), PUSHING),
    "reward_transform": ("reinforce_transform",),
    **dict.fromkeys(("target_dist_beta", "alpha", "token_reduction", "reinforce_baseline_type"), METHODS[1:]),
}
"""Options and the methods that use them; with the others target_dist_beta and alpha are part of the run's name."""
MODULATIONS = ("modulation_model", "modulation_linear_head", "modulation_nn_head")

# Swear words in several spellings, in GPT-2's vocabulary.
GPT2_BAD_TOKENS = (
    *(5089, 9372, 20654, 25617, 30998, 31699, 34094, 46733, 21551, 40267),
    *(7510, 16211, 20041, 32574, 41356, 31030, 47209, 18185, 29836),
)


@dataclass(frozen=True, kw_only=True)
class TailMethodOptions(Options):
    """Rare bad answers"""

    method: str = option("repulse", choices=METHODS)
    """ppo; reinforce; reinforce_transform (a reward that punishes bad answers harder); base_proposal (the worst of the
    policy's own answers are pushed down); repulse (what a learnt proposal finds is)."""
    target_dist_beta: float = -10.0
    """Beta below 0: bad answers are samples of policy(answer) exp(beta reward). Of reinforce_transform the exponent."""
    alpha: float = option(0.1, at_least=0)
    """How hard bad answers are pushed down. Of reinforce_transform the weight of its punishment."""
    push_down_scale: str = option("per_sample", choices=("per_sample", "per_group"))
    """per_sample divides --alpha by the answers of a group, as the original does; per_group does not."""
    start_alpha: float | None = option(None, above=0)
    """What --alpha is at first: it goes from here to there over all updates, by the same factor each time."""
    start_target_dist_beta: float | None = None
    """The same of --target_dist_beta."""
    token_reduction: str = option("token_mean", choices=("token_mean", "token_sum"))
    """token_mean: an answer counts with its mean log-probability, as in the original; token_sum: with its whole one,
    so that long and short answers follow the same objective."""
    reward_transform: str = option("minus_alpha_exp_beta_r", choices=("minus_alpha_exp_beta_r", "minus_alpha_ind"))
    """Of reinforce_transform: minus_alpha_exp_beta_r, or minus_alpha_ind, which subtracts --alpha from bad answers."""
    bad_threshold: float | None = None
    """Answers with a reward below this are bad: their share is measured."""
    reinforce_baseline_type: str = option("expectation", choices=("expectation", "hardcoded", "none"))
    """What a return is compared with: expectation (the mean of its group's other ones), hardcoded or none."""
    reinforce_hardcoded_baseline: float = option(0.0, needs=("reinforce_baseline_type", "hardcoded"))
    """The constant of hardcoded."""

    def check(self) -> Iterable[str]:
        by_threshold = self.reward_transform == "minus_alpha_ind"
        tilting = self.method in PUSHING or (self.method == "reinforce_transform" and not by_threshold)
        if tilting and self.target_dist_beta >= 0:
            raise UserError(
                f"--target_dist_beta {self.target_dist_beta:g}: with --method {self.method} it must be below 0, or "
                "good answers would be pushed down with the bad ones"
            )
        if self.start_target_dist_beta is not None and self.start_target_dist_beta >= 0:
            raise UserError(
                f"--start_target_dist_beta {self.start_target_dist_beta:g}: it must be below 0, as the last"
            )
        if self.start_alpha is not None and self.alpha == 0:
            raise UserError("--start_alpha: no factor leads from it to --alpha 0; give a small one")
        if self.method == "reinforce_transform" and by_threshold and self.bad_threshold is None:
            raise UserError(
                "--reward_transform minus_alpha_ind needs --bad_threshold: the reward below which one is bad"
            )
        if self.method in ("reinforce_transform", *PUSHING) and self.alpha == 0:
            yield f"--alpha 0 makes --method {self.method} the same as reinforce"
        for name, methods in OF_METHODS.items():
            if self.method not in methods:
                yield from self.idle([name], f"with --method {self.method}")


@dataclass(frozen=True, kw_only=True)
class ProposalOptions(Options):
    """Proposal of repulse"""

    proposal: str = option("model", choices=("model", *MODULATIONS))
    """model: a language model of its own, started from --pretrain; modulation_model, modulation_linear_head,
    modulation_nn_head: the policy times what a model, or a head on its hidden states, has learnt."""
    proposal_lora_rank: int = option(0, at_least=0)
    """Above 0 the proposal is adapters of this rank on the policy's own weights: no second model is held."""
    proposal_loss: str = option("ctl", choices=("ctl", "ctl_nosecondterm"))
    """ctl (contrastive twist learning), or ctl_nosecondterm, which leaves out its second term. With --token_reduction
    token_sum, or if all answers are equally long, that term only takes away noise; else what is learnt changes."""
    proposal_learning_rate: float = option(3e-5, at_least=0)
    """Peak learning rate of the proposal."""
    proposal_updates: int = option(1, at_least=1)
    """Updates of the proposal for each one of the policy, every one on answers of its own."""

    def check(self) -> Iterable[str]:
        if self.proposal in MODULATIONS and self.proposal_loss == "ctl_nosecondterm":
            raise UserError(
                f"--proposal_loss ctl_nosecondterm: without its second term --proposal {self.proposal} grows "
                "without bound; use ctl"
            )
        if self.proposal_lora_rank and self.proposal in MODULATIONS:
            raise UserError(f"--proposal_lora_rank: --proposal {self.proposal} takes no adapters; leave it out")
        return ()


@dataclass(frozen=True, kw_only=True)
class TailMeasureOptions(Options):
    """Measurements"""

    save_info_path: str | None = None
    """Folder of the metric files, in the original's layout and under its names; unset: --save_path."""
    fit_steps: int = option(1, at_least=1)
    """Repeat the whole training this many times, and measure after each."""
    single_prompt: str | None = None
    """Use this text in place of every prompt."""
    analytic_bad_word_calc: bool = False
    """Measure the exact probability that an answer to --single_prompt holds a bad token. For very short answers."""
    bad_token_ids: tuple[int, ...] | None = option(None, needs="analytic_bad_word_calc")
    """The bad tokens; unset: swear words of GPT-2's vocabulary."""
    evaluate_heldout_sampling: bool = False
    """After training answer the held-out prompts, and keep every reward."""
    heldout_prompt_data: str | None = option(None, needs="evaluate_heldout_sampling")
    """Held-out prompts, as --prompt_data."""
    heldout_input_key: str | None = option(None, needs="evaluate_heldout_sampling")
    """Column that holds them; unset: --input_key."""
    sampling_iters: int = option(1, at_least=1, needs="evaluate_heldout_sampling")
    """Passes over the held-out prompts."""
    save_negdata: bool = False
    """Keep the distinct texts that were sampled in training with a reward below the next option."""
    save_negdata_threshold: float = option(-5.0, needs="save_negdata")
    """The reward below which a text is kept; not given: --bad_threshold, if that is."""
    negdata_path: str | None = None
    """Folder of the file of these texts; unset: --save_info_path."""

    def check(self) -> Iterable[str]:
        if self.evaluate_heldout_sampling and not self.heldout_prompt_data:
            raise UserError("--evaluate_heldout_sampling needs --heldout_prompt_data: a file, a folder or a hub name")
        if self.analytic_bad_word_calc and self.single_prompt is None:
            raise UserError("--analytic_bad_word_calc sums over the answers to one prompt: give it as --single_prompt")
        if self.fit_steps > 1 and not self.analytic_bad_word_calc:
            raise UserError("--fit_steps measures with --analytic_bad_word_calc: add it, or use --num_episodes")
        return check_sources(self.heldout_prompt_data, "--heldout_prompt_data")
