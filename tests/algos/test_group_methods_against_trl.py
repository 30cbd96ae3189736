"""GRPO and RLOO: loss and gradient of one batch by TRL's trainers and by our functions, from the same answers.

TRL scores, shapes and trains; only its sampling is replaced. Weights move between sampling and training, so that ratios
differ from 1 and clips bind. Where TRL means something else:
- its GRPO adds 1e-4 to a group's deviation, ours 1e-9: rewards in the hundreds here make both vanish;
- its default loss is the mean over all tokens of the step, as ours is; that of `dr_grpo` divides by a constant;
- it multiplies the KL loss by the ratio unless told not to; ours is the documents' plain k3;
- its `delta` bounds the ratio. Above 1 + high, that is our dual clip;
- its RLOO has one ratio for a whole answer, ours one for each token. They have one gradient until the weights move,
  and our function on sums over answers is TRL's loss;
- its RLOO puts the KL of the whole answer into the reward before the baseline is taken, and clips rewards before it;
  ours clips what is left after the baseline, and lets a token answer for the KL from there on. Both are off here.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn

from tests.algos.one_step import answer_log_probs, causal_lm, step_of, trl_arguments
from tests.train.job_run import relative_difference, write_model
from trimtab.algos.group_rewards import SHAPED_BY
from trimtab.algos.policy_losses import kl_estimate, ppo_loss, sapo_loss
from trimtab.config.objective_options import ESTIMATORS
from trimtab.config.rl_jobs import GRPOOptions
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.train.rl.state import Counters

SAMPLES = 4
PROMPTS = ["31>", "2470>"]
ANSWERS = ["13", "31", "1", "133", "0247", "7420", "024", "7"]  # SAMPLES of each prompt
REWARDS = [300.0, -100.0, 50.0, 0.0, 400.0, -250.0, 100.0, -90.0]
LENGTHS = [len(answer) + 1 for answer in ANSWERS]  # with <eos>
LIMIT = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("group_methods")
    write_model(folder / "model", spread=0.1)
    return folder


def move(model: nn.Module, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def trl_batch(make_trainer, off_policy: bool) -> SimpleNamespace:
    """TRL's loss and gradient, its metrics, and copies of the models: reference, at sampling, in training."""
    tokenizer = make_tokenizer()
    answers = [tokenizer.encode(answer + "<eos>") for answer in ANSWERS]
    trainer = make_trainer(
        reward_funcs=lambda completions, **_: REWARDS,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
    )
    is_grpo = type(trainer).__name__ == "GRPOTrainer"
    trainer._generate_single_turn = lambda *_: (answers, None) if is_grpo else answers
    trainer.current_gradient_accumulation_steps = 1  # the training loop would say so
    model = trainer.model.train()
    reference = copy.deepcopy(model)
    move(model, 0.02, seed=1)
    old = copy.deepcopy(model)
    batch = trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS for _ in range(SAMPLES)])
    if off_policy:
        move(model, 0.02, seed=2)
    gradients, loss = step_of(model, trainer.compute_loss(model, batch))
    models = SimpleNamespace(reference=reference, old=old, policy=model)
    return SimpleNamespace(gradients=gradients, loss=loss, models=models, metrics=trainer._metrics["train"])


def plain_log_probs(folder, model: nn.Module) -> tuple[nn.Module, Tensor]:
    """A model without TRL's head but with this one's weights, and the log-probs [N] of all answers' tokens."""
    plain, tokenizer = causal_lm(folder / "model"), make_tokenizer()
    plain.load_state_dict(model.state_dict())
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS for _ in range(SAMPLES)]
    answers = [tokenizer.encode(answer + "<eos>") for answer in ANSWERS]
    parts = [answer_log_probs(plain, torch.tensor(p + a), len(p)) for p, a in zip(prompts, answers, strict=True)]
    return plain, torch.cat(parts)


def shaped(estimator: str) -> Tensor:
    """Rewards of all answers after the estimator's shaping."""
    return SHAPED_BY[ESTIMATORS[estimator].group](torch.tensor(REWARDS).view(-1, SAMPLES)).flatten()


def on_tokens(values_S: Tensor) -> Tensor:
    return values_S.repeat_interleave(torch.tensor(LENGTHS))


def assert_same_gradient(model: nn.Module, loss: Tensor, trl: SimpleNamespace) -> None:
    gradients, _ = step_of(model, loss)
    assert relative_difference(trl.gradients, gradients) < 1e-5


def arguments(folder) -> dict:
    own = {"per_device_train_batch_size": len(ANSWERS), "num_generations": SAMPLES, "max_completion_length": LIMIT}
    common = {name: value for name, value in trl_arguments(folder).items() if name != "max_length"}
    return common | own | {"num_iterations": 2}  # so that log-probs at sampling are kept


@pytest.mark.parametrize(
    "estimator, settings, dual_clip, beta",
    [
        ("group_norm", {"beta": 0.0}, None, 0.0),
        ("group_norm", {"beta": 0.3, "use_bias_correction_kl": False}, None, 0.3),
        ("group_norm", {"beta": 0.0, "delta": 1.4}, 1.4, 0.0),
        ("dr_grpo", {"beta": 0.0, "scale_rewards": "none", "loss_type": "dr_grpo"}, None, 0.0),
    ],
    ids=["grpo", "grpo_with_k3_loss", "grpo_with_dual_clip", "dr_grpo"],
)
def test_the_clipped_loss_equals_trls_grpo(folder, estimator, settings, dual_clip, beta):
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(**arguments(folder) | settings, epsilon=0.1, epsilon_high=0.15)
    trl = trl_batch(lambda **rest: GRPOTrainer(str(folder / "model"), args=config, **rest), off_policy=True)

    policy, log_probs_N = plain_log_probs(folder, trl.models.policy)
    old_N = plain_log_probs(folder, trl.models.old)[1].detach()
    advantages_N = on_tokens(shaped(estimator))
    loss_N, clipped_N = ppo_loss(log_probs_N, old_N, advantages_N, 0.1, 0.15, dual_clip)
    if beta:
        reference_N = plain_log_probs(folder, trl.models.reference)[1].detach()
        loss_N = loss_N + beta * kl_estimate(log_probs_N, reference_N, "k3")
    tokens = len(ANSWERS) * LIMIT if estimator == "dr_grpo" else len(log_probs_N)
    loss = loss_N.sum() / tokens

    assert 0.1 < clipped_N.float().mean() < 0.9
    assert loss.item() == pytest.approx(trl.loss, rel=1e-5, abs=1e-5)
    assert_same_gradient(policy, loss, trl)
    without_dual_clip = ppo_loss(log_probs_N, old_N, advantages_N, 0.1, 0.15)[1]
    assert trl.metrics["clip_ratio/region_mean"] == pytest.approx([without_dual_clip.float().mean().item()])
    assert (clipped_N != without_dual_clip).any() == (dual_clip is not None)


def test_the_soft_gate_equals_trls_sapo(folder):
    """Its mean is over the answers' means, as ours with --loss_reduction answer, which is sapo's default."""
    from trl import GRPOConfig, GRPOTrainer

    settings = {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 2.0, "beta": 0.0}
    config = GRPOConfig(**arguments(folder) | settings)
    trl = trl_batch(lambda **rest: GRPOTrainer(str(folder / "model"), args=config, **rest), off_policy=True)

    policy, log_probs_N = plain_log_probs(folder, trl.models.policy)
    old_N = plain_log_probs(folder, trl.models.old)[1].detach()
    loss_N, _ = sapo_loss(log_probs_N, old_N, on_tokens(shaped("group_norm")), (1.0, 2.0))
    loss = (loss_N / on_tokens(torch.tensor(LENGTHS))).sum() / len(ANSWERS)
    assert loss.item() == pytest.approx(trl.loss, rel=1e-5, abs=1e-5)
    assert_same_gradient(policy, loss, trl)


def test_the_entropy_bonus_follows_trls_controller(folder):
    """Coefficients and gating of TRL's trainer over five steps, from the entropies that it measured."""
    from trl import GRPOConfig, GRPOTrainer

    settings = {"use_adaptive_entropy": True, "entropy_coef": 0.002, "entropy_coef_delta": 0.004, "beta": 0.0}
    config = GRPOConfig(**arguments(folder) | settings, entropy_coef_max=0.011, entropy_target=2.0)
    made = []

    def make(**rest):
        made.append(GRPOTrainer(str(folder / "model"), args=config, **rest))
        return made[0]

    trl_batch(make, off_policy=True)
    trainer, options = made[0], GRPOOptions(entropy_loss_coef=0.002, entropy_target=2.0, entropy_coef_step=0.004,
                                            entropy_coef_max=0.011)  # fmt: skip
    ours = Counters(0.0, entropy_coefficient=0.002)
    assert ours.applied_entropy(options) == 0.0, "as TRL's, whose last entropy is infinite at first"
    for target in (None, 100.0, 100.0, 100.0, 0.1):  # of the next step; None: as in the first
        options = options if target is None else replace(options, entropy_target=target)
        if target is not None:
            trainer.args.entropy_target = target
            trainer.compute_loss(trainer.model, trl_inputs(trainer))
        ours.adapt_entropy({"token_entropy": trainer._last_world_entropy, "applied": 1.0}, options)
        assert ours.entropy_coefficient == pytest.approx(trainer.entropy_coef)
        assert ours.low_entropy == (trainer._last_world_entropy <= trainer.args.entropy_target)


def trl_inputs(trainer):
    return trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS for _ in range(SAMPLES)])


@pytest.fixture(scope="module")
def rloo(folder):
    from trl import RLOOConfig, RLOOTrainer

    config = RLOOConfig(**arguments(folder), beta=0.0, epsilon=0.1, epsilon_high=0.15)
    return lambda off_policy: trl_batch(
        lambda **rest: RLOOTrainer(str(folder / "model"), args=config, **rest), off_policy
    )


def test_the_clipped_loss_of_whole_answers_equals_trls_rloo(folder, rloo):
    trl = rloo(off_policy=True)
    policy, log_probs_N = plain_log_probs(folder, trl.models.policy)
    old_N = plain_log_probs(folder, trl.models.old)[1].detach()
    log_probs_S, old_S = (torch.stack([part.sum() for part in x.split(LENGTHS)]) for x in (log_probs_N, old_N))
    loss_S, clipped_S = ppo_loss(log_probs_S, old_S, shaped("rloo"), 0.1, 0.15)
    assert clipped_S.any() and not clipped_S.all()
    assert loss_S.mean().item() == pytest.approx(trl.loss, rel=1e-5)
    assert_same_gradient(policy, loss_S.mean(), trl)


def test_before_the_weights_move_the_token_loss_has_the_gradient_of_trls_rloo(folder, rloo):
    trl = rloo(off_policy=False)
    policy, log_probs_N = plain_log_probs(folder, trl.models.policy)
    loss_N, _ = ppo_loss(log_probs_N, log_probs_N.detach(), on_tokens(shaped("rloo")), 0.1, 0.15)
    assert_same_gradient(policy, loss_N.sum() / len(ANSWERS), trl)
