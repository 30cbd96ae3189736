"""The faults of test_planted_faults.py in TRL's GRPOTrainer, where it has the part that is at fault: what does it say?

Noticed: an exception, a warning or a line of a logger at WARNING or above before the end of the second step that the
same run without the fault does not have. A figure in the log that a reader might find odd is not counted.
"""

import contextlib
import copy
import logging
import warnings
from functools import cache

import pytest
import torch

from tests.train.job_run import write_model
from tests.train.test_planted_faults import FAULTS
from trimtab.embedded.sort_task import make_prompts

pytestmark = pytest.mark.long
pytest.importorskip("trl")

PLANTS: dict[str, tuple] = {}
NOTICED: set[str] = set()  # by TRL 1.16


def plant(**settings):
    """A function (trainer, monkeypatch) that plants the fault of its name; `settings` of the run."""

    def register(function):
        assert function.__name__ in FAULTS
        PLANTS[function.__name__] = (function, settings)
        return function

    return register


def after(trainer, name, change):
    """Change what a method of the trainer returns."""
    plain = getattr(trainer, name)
    setattr(trainer, name, lambda *given, **how: change(plain(*given, **how)))


@plant()
def frozen_tensor(trainer, monkeypatch):
    trainer.model.get_input_embeddings().weight.requires_grad_(False)


@plant(lora=True)
def adapters_without_gradient(trainer, monkeypatch):
    layer = trainer.model.get_base_model().model.layers[0]
    layer.register_forward_hook(lambda _, given, out: out.detach() if torch.is_tensor(out) else (out[0].detach(),))


@plant()
def working_weights_not_written(trainer, monkeypatch):
    def create(*_):
        copies = [torch.nn.Parameter(p.detach().clone()) for p in trainer.model.parameters()]
        trainer.optimizer = torch.optim.AdamW(copies, lr=1e-3)
        return trainer.optimizer

    trainer.create_optimizer = create


@plant(model="tied")
def tied_head_is_a_copy(trainer, monkeypatch):
    head = trainer.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


@plant()
def gradient_multiplied_by_micro_batches(trainer, monkeypatch):
    after(trainer, "_compute_loss", lambda loss: loss * trainer.args.gradient_accumulation_steps)


@plant()
def mask_shifted_after_retokenizing(trainer, monkeypatch):
    def shifted(found):
        found["completion_mask"] = found["completion_mask"].clone()
        found["completion_mask"][:, 0] = 0
        return found

    after(trainer, "_generate_and_score_completions", shifted)


@plant()
def end_never_trained(trainer, monkeypatch):
    end = trainer.processing_class.eos_token_id

    def masked(found):
        return {**found, "completion_mask": found["completion_mask"] * (found["completion_ids"] != end)}

    after(trainer, "_generate_and_score_completions", masked)


@plant(template="{% for m in messages %}{{ '<' ~ m['role'] ~ '>' ~ m['content'] }}{% endfor %}")
def template_without_generation_prompt(trainer, monkeypatch):
    pass


@plant(shifted=True)
def labels_shifted_in_the_users_file(trainer, monkeypatch):
    pass


@plant()
def reward_swallowed_as_zero(trainer, monkeypatch):
    def reward(completions, **_):
        return [0.0 for _ in completions]

    trainer.reward_funcs = [reward]


@plant()
def advantages_over_the_whole_batch(trainer, monkeypatch):
    kept = []
    after(trainer, "_calculate_rewards", lambda found: kept.append(found) or found)

    def whole(found):
        rewards = kept[-1].sum(1)
        return {**found, "advantages": rewards - rewards.mean()}

    after(trainer, "_generate_and_score_completions", whole)


@plant(beta=0.1)
def kl_sign_in_the_loss(trainer, monkeypatch):
    trainer.beta = -trainer.beta


@plant()
def stale_engine_weights(trainer, monkeypatch):
    kept = copy.deepcopy(trainer.model)
    kept.gradient_checkpointing_disable()  # as TRL does for the model that it samples with

    @contextlib.contextmanager
    def stale(model):
        kept.generation_config = model.generation_config
        yield kept

    generate_with(monkeypatch, stale)


@plant(lora=True)
def stale_adapter(trainer, monkeypatch):
    @contextlib.contextmanager
    def without(model):
        with model.disable_adapter():
            yield model

    generate_with(monkeypatch, without)


@plant(beta=0.1)
def reference_is_the_policy(trainer, monkeypatch):
    trainer.ref_model = trainer.model


@plant(resumed=True)
def resume_off_by_one(trainer, monkeypatch):
    from transformers import TrainerState

    plain = TrainerState.load_from_json.__func__

    def earlier(cls, path):
        state = plain(cls, path)
        state.global_step -= 1
        return state

    monkeypatch.setattr(TrainerState, "load_from_json", classmethod(earlier))


def generate_with(monkeypatch, model_of):
    """Sample with another model than the trainer's, or in another state of it."""
    from trl.trainer import grpo_trainer

    plain = grpo_trainer.unwrap_model_for_generation

    @contextlib.contextmanager
    def unwrapped(*given, **how):
        with plain(*given, **how) as model, model_of(model) as found:
            yield found

    monkeypatch.setattr(grpo_trainer, "unwrap_model_for_generation", unwrapped)


# ---- the runs


def digits(completions, label, **_):
    texts = [completion[0]["content"] for completion in completions]
    return [len(set(text) & set(right)) + 0.5 * (len(text) <= 6) for text, right in zip(texts, label)]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.said: set[str] = set()

    def emit(self, record):
        self.said.add(str(record.msg)[:80])


def said_by(folder, plant, monkeypatch, *, model="model", lora=False, beta=0.0, resumed=False, **data) -> set[str]:
    """Beginnings of the warnings and of the exception of a run of two steps."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": row["input"], "label": row["label"]} for row in make_prompts(9, 1)]
    if data.get("shifted"):
        labels = [row["label"] for row in rows]
        rows = [{**row, "label": label} for row, label in zip(rows, labels[1:] + labels[:1])]
    tokenizer = AutoTokenizer.from_pretrained(folder / model)
    tokenizer.chat_template = data.get("template", tokenizer.chat_template)
    lines, out = Lines(), folder / f"out-{plant.__name__ if plant else 'plain'}"
    known = [logging.getLogger(name) for name in ("trl", "transformers", "accelerate", "peft")]

    def train(steps, checkpoint=None, planted=None):
        config = GRPOConfig(
            str(out), max_steps=steps, num_generations=4, per_device_train_batch_size=4, beta=beta, use_cpu=True,
            gradient_accumulation_steps=2, max_completion_length=12, report_to="none", bf16=False, save_steps=1,
            save_strategy="steps" if resumed else "no", logging_steps=1, learning_rate=1e-3, disable_tqdm=True,
        )  # fmt: skip
        adapter = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if lora else {}
        given = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer, **adapter}
        trainer = GRPOTrainer(str(folder / model), digits, config, **given)
        if planted is not None:
            planted(trainer, monkeypatch)
        trainer.train(resume_from_checkpoint=checkpoint)

    for logger in known:
        logger.addHandler(lines)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if resumed:
                train(1)
            try:
                train(2, str(out / "checkpoint-1") if resumed else None, plant)
            except Exception as error:
                lines.said.add(f"{type(error).__name__}: {error}"[:80])
    finally:
        for logger in known:
            logger.removeHandler(lines)
    return lines.said | {str(warning.message)[:80] for warning in warned}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    write_model(folder / "model")
    write_model(folder / "tied", "llama_tied")
    return folder


@pytest.fixture(scope="module")
def without_fault(folder):
    """What the run says without a fault, by its settings."""

    @cache
    def said(*settings):
        found = {k: v for k, v in settings if k not in ("template", "shifted")}
        with pytest.MonkeyPatch.context() as monkeypatch:
            return said_by(folder, None, monkeypatch, **found)

    return said


@pytest.mark.parametrize("name", PLANTS)
def test_what_trl_notices(name, folder, without_fault, monkeypatch):
    function, settings = PLANTS[name]
    new = said_by(folder, function, monkeypatch, **settings) - without_fault(*settings.items())
    assert bool(new) == (name in NOTICED), new
