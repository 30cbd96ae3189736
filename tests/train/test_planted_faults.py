"""Faults that other projects had, planted here one at a time: how many does a run notice before its second step?

A fault is one function of ours that does the wrong thing, or data, a template or a reward as a user might give them.
Caught: a check before the first step fails or warns, an alarm of the first iteration does, or the run fails in it.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.train.job_run import write_model, write_rows
from trimtab.algos import group_rewards
from trimtab.cli.main import main
from trimtab.data import rendering
from trimtab.data.prompts import PromptDataset
from trimtab.embedded.sort_task import make_prompts, make_rows, make_tokenizer
from trimtab.models import attention
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.train import proof, supervised
from trimtab.train.optimizer import Optimizer
from trimtab.train.rl import objective, roles, token_advantages, trainer
from trimtab.train.supervised_tasks import SFTTask

FAULTS = {}


def fault(check: str, issue: str, verb: str = "sft", words: str = ""):
    """A function (monkeypatch, folder) that plants a fault, the check that notices it (empty: an alarm), and the issue
    that describes it."""

    def register(plant):
        FAULTS[plant.__name__] = pytest.param(plant, check, verb, words, id=plant.__name__)
        plant.issue = issue
        return plant

    return register


# ---- gradients and weights


@fault("update", "https://github.com/artidoro/qlora/pull/217")
def frozen_tensor(monkeypatch, folder):
    """An embedding whose requires_grad was changed after loading."""
    plain = SFTTask.load_model

    def load(task, device):
        loaded = plain(task, device)
        loaded.model.inner.get_input_embeddings().weight.requires_grad_(False)
        return loaded

    monkeypatch.setattr(SFTTask, "load_model", load)


@fault(
    "update", "https://github.com/huggingface/transformers/issues/26221", words="--lora_rank 4 --gradient_checkpointing"
)
def adapters_without_gradient(monkeypatch, folder):
    """Reentrant checkpointing of layers whose inputs need no gradient: the lower layers get none."""
    plain = Policy.hidden

    def hidden(policy, batch, **how):
        layers = policy.inner.model.layers
        handle = layers[0].register_forward_hook(
            lambda layer, given, out: out.detach() if torch.is_tensor(out) else (out[0].detach(), *out[1:])
        )
        try:
            return plain(policy, batch, **how)
        finally:
            handle.remove()

    monkeypatch.setattr(Policy, "hidden", hidden)


@fault("update", "https://github.com/NVIDIA/Megatron-LM/issues/656", words="--bf16")
def working_weights_not_written(monkeypatch, folder):
    """The optimizer moves its masters, and the weights in use stay."""
    monkeypatch.setattr(Optimizer, "_write_back", lambda *_: None)


@fault("update", "https://github.com/hiyouga/LlamaFactory/issues/10560", words="--pretrain {folder}/tied")
def tied_head_is_a_copy(monkeypatch, folder):
    """The head of a model that ties it is another tensor, which is trained apart from the embedding."""
    plain = SFTTask.load_model

    def load(task, device):
        loaded = plain(task, device)
        head = loaded.model.inner.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        return loaded

    monkeypatch.setattr(SFTTask, "load_model", load)


@fault("micro_batches", "https://github.com/ml-explore/mlx-lm/pull/1413")
def gradient_scaled_by_micro_batches(monkeypatch, folder):
    """Every micro-batch is divided by its own tokens, and so short ones count for more."""
    plain = SFTTask.loss

    def loss(task, model, batch, totals):
        return plain(task, model, batch, {**totals, "trained_tokens": batch.trained_tokens})

    monkeypatch.setattr(SFTTask, "loss", loss)


@fault("micro_batches", "https://github.com/karpathy/nanoGPT/issues/206", "grpo")
def gradient_multiplied_by_micro_batches(monkeypatch, folder):
    """The sum over micro-batches is not divided by anything."""

    def accumulate(model, mesh, batches, count, share):
        for batch in batches:
            batch.weight *= count
            found = share(batch)
            (found.loss * batch.weight).backward()
        return {}

    monkeypatch.setattr(trainer, "accumulate", accumulate)  # the run's own


@fault("neighbours", "https://github.com/OpenRLHF/OpenRLHF/issues/587")
def packed_neighbours_visible(monkeypatch, folder):
    """A packed row is one sequence for attention, once the model is loaded."""
    plain, loaded = attention.PackedRow.of.__func__, []
    load = SFTTask.load_model

    def of(cls, spans, device):
        whole = [type(spans[0])(0, sum(span.length for span in spans))] if loaded else spans
        return plain(cls, whole, device)

    monkeypatch.setattr(attention.PackedRow, "of", classmethod(of))
    monkeypatch.setattr(SFTTask, "load_model", lambda task, device: (load(task, device), loaded.append(True))[0])


# ---- data and templates


@fault("rendering", "https://github.com/huggingface/trl/issues/598")
def mask_shifted_after_retokenizing(monkeypatch, folder):
    """The prompt has one token more when it is tokenized alone, and the mask begins one token late."""
    plain = rendering._reaches_into

    def shifted(starts, ends, spans):
        trained = plain(starts, ends, spans)
        trained[trained.argmax()] = False
        return trained

    monkeypatch.setattr(rendering, "_reaches_into", shifted)


@fault("rendering", "https://github.com/huggingface/trl/issues/1623")
def end_never_trained(monkeypatch, folder):
    """The end token is the padding token, whose labels are masked."""
    plain = rendering.tokenize_renderings

    def tokenized(renderings, tokenizer):
        for ids, trained in plain(renderings, tokenizer):
            yield ids, trained & (ids != tokenizer.eos_token_id)

    monkeypatch.setattr(rendering, "tokenize_renderings", tokenized)
    monkeypatch.setattr("trimtab.data.examples.tokenize_renderings", tokenized)


@fault(
    "rendering",
    "https://github.com/huggingface/trl/pull/1114",
    words="--tokenizer_chat_template {folder}/doubled.jinja",
)
def end_doubled_by_template(monkeypatch, folder):
    """The template writes a special token, and the tokenizer adds it again."""
    template = make_tokenizer().chat_template
    (folder / "doubled.jinja").write_text(template.replace("<eos>", "<eos><eos>"))


@fault(
    "rendering",
    "https://github.com/instructlab/training/pull/232",
    "grpo",
    "--tokenizer_chat_template {folder}/without.jinja",
)
def template_without_generation_prompt(monkeypatch, folder):
    """The prompt ends before the assistant's header."""
    turn = "{% for m in messages %}{{ '<' ~ m['role'] ~ '>' ~ m['content'] }}{% endfor %}"
    (folder / "without.jinja").write_text(turn)


@fault("data", "https://github.com/verl-project/verl/issues/6239", "grpo")
def labels_shifted_by_one_row(monkeypatch, folder):
    """Tokens of the rows that were kept, columns of all rows: one row was left out before."""
    plain = PromptDataset.__init__

    def init(store, tokens, rows, *keys):
        plain(store, tokens, rows, *keys)
        store._row = lambda index: rows[(int(tokens.rows[index]) + 1) % len(rows)]

    monkeypatch.setattr(PromptDataset, "__init__", init)


@fault("data", "https://github.com/verl-project/verl/issues/6239", "grpo", "--prompt_data {folder}/shifted.jsonl")
def labels_shifted_in_the_users_file(monkeypatch, folder):
    rows = make_prompts(9, 1)
    labels = [row["label"] for row in rows]
    write_rows(folder / "shifted.jsonl", [{**r, "label": label} for r, label in zip(rows, labels[1:] + labels[:1])])


# ---- rewards, advantages, KL


@fault(
    "",
    "https://github.com/NVIDIA-NeMo/RL/issues/431",
    "grpo",
    "--reward_func {folder}/reward.py --reward_verifier None",
)
def reward_swallowed_as_zero(monkeypatch, folder):
    """A reward function that fails on everything and says 0."""
    (folder / "reward.py").write_text(
        "def reward(queries, prompts, labels):\n    try:\n        return [float(query['x']) for query in queries]\n"
        "    except Exception:\n        return [0.0 for _ in queries]\nreward_func = reward\n"
    )


@fault("objective", "https://github.com/THUDM/slime/issues/1414", "grpo")
def advantages_over_the_whole_batch(monkeypatch, folder):
    """Rewards are compared with those of the batch and not of their prompt."""
    whole = {by: lambda rewards_GA: rewards_GA - rewards_GA.mean(0, keepdim=True) for by in token_advantages.SHAPED_BY}
    monkeypatch.setattr(token_advantages, "SHAPED_BY", whole)
    monkeypatch.setattr(group_rewards, "SHAPED_BY", whole)


@fault("objective", "https://github.com/qiancheng0/ToolRL/issues/52", "grpo", "--init_kl_coef 0.1 --use_kl_loss")
def kl_sign_in_the_loss(monkeypatch, folder):
    plain = objective.kl_estimate
    monkeypatch.setattr(objective, "kl_estimate", lambda *given: -plain(*given))


@fault("objective", "https://github.com/pytorch/rl/pull/2908", "grpo", "--init_kl_coef 0.1 --use_kl_loss False")
def kl_sign_in_the_rewards(monkeypatch, folder):
    plain = token_advantages.kl_estimate
    monkeypatch.setattr(token_advantages, "kl_estimate", lambda *given: -plain(*given))


# ---- engine, reference, resume


@fault("engine", "https://github.com/huggingface/trl/issues/3189", "grpo")
def stale_engine_weights(monkeypatch, folder):
    """The engine keeps a copy of the first weights."""
    plain = roles.build_engine

    def build(policy, *given, **how):
        import copy

        return plain(copy.deepcopy(policy), *given, **how)

    monkeypatch.setattr(roles, "build_engine", build)


@fault("engine", "https://github.com/verl-project/verl/issues/7495", "grpo", "--lora_rank 4")
def stale_adapter(monkeypatch, folder):
    """The engine samples without the adapter, which is zero in the beginning."""
    from trimtab.models.lora import adapters_off

    plain = BuiltinEngine.batch_session

    def session(engine, sampling):
        opened = plain(engine, sampling)
        opened.contexts.enter_context(adapters_off(engine.policy.model))
        return opened

    monkeypatch.setattr(BuiltinEngine, "batch_session", session)


@fault("engine", "https://github.com/aburkov/theLMbook/issues/8", "grpo", "--init_kl_coef 0.1")
def reference_is_the_policy(monkeypatch, folder):
    """The reference shares the policy's weights, and so the KL is 0 after every update."""
    plain, kept = roles.actor_of, []

    def actor(options, loaded, *given, **how):
        kept.append(loaded)
        return plain(options, loaded, *given, **how)

    def scorer(options, place, policy=None, pretrain=None):
        made = scorer_plain(options, place, policy, pretrain)
        made.reference.model = kept[0].model
        return made

    scorer_plain = roles.scorer
    monkeypatch.setattr(roles, "actor_of", actor)
    monkeypatch.setattr(roles, "scorer", scorer)


@fault("checkpoint", "https://github.com/Red-Hat-AI-Innovation-Team/mini_trainer/pull/79", "check sft")
def resume_off_by_one(monkeypatch, folder):
    """The step that a checkpoint was saved after is trained again."""
    plain = supervised.SupervisedCounters

    def counters(step=0, **more):
        return plain(step - 1 if more else step, **more)

    monkeypatch.setattr(supervised, "SupervisedCounters", counters)


# ---- the runs


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    write_model(folder / "model")
    write_model(folder / "tied", "llama_tied")
    write_rows(folder / "train.jsonl", make_rows(24, 1))
    write_rows(folder / "prompts.jsonl", make_prompts(9, 1))
    return folder


SFT = "--dataset {folder}/train.jsonl --max_len 40 --train_batch_size 8 --micro_train_batch_size 4 --max_steps 2"
GRPO = (
    "--prompt_data {folder}/prompts.jsonl --label_key label --apply_chat_template --prompt_max_len 40 --max_steps 2 "
    "--generate_max_len 12 --n_samples_per_prompt 4 --rollout_batch_size 4 --train_batch_size 8 --init_kl_coef 0 "
    "--micro_train_batch_size 2 --reward_verifier regex([0-4]):1.0,length(0-6):0.5"
)


def run(folder: Path, out: Path, verb: str, words: str) -> int:
    fixed = SFT if verb.endswith("sft") else GRPO
    text = f"{verb} --pretrain {{folder}}/model {fixed} --save_path {out} {words}"
    return main(text.format(folder=folder).split())


def alarms_of_first_step(out: Path, said: str) -> list[str]:
    """What was said before the row of the second step, about what is wrong. The truncation of a random model is not."""
    before = said.partition("step 2")[0] if (out / "metrics.jsonl").exists() else said
    wrong = ("warning", "alarm", "all rewards are equal")
    return [line for line in before.splitlines() if any(word in line for word in wrong) and "max_len" not in line]


@pytest.mark.parametrize(("plant", "check", "verb", "words"), FAULTS.values())
def test_a_planted_fault_is_noticed_before_the_second_step(
    plant, check, verb, words, task, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(proof, "SECONDS", 600.0)  # on a busy machine, too
    plant(monkeypatch, task)
    code = run(task, tmp_path / "out", verb, words)
    said = "\n".join(capsys.readouterr())
    metrics = tmp_path / "out" / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    stopped = code != 0 and max(steps, default=0) < 2
    alarms = alarms_of_first_step(tmp_path / "out", said)
    assert stopped or alarms, said
    problems = [
        line for line in said.splitlines() if line.startswith("check ") and (": failed" in line or line in alarms)
    ]
    assert not check or any(line.startswith(f"check {check}:") for line in problems), said


@pytest.mark.parametrize("verb", ["sft", "grpo", "check sft"])
def test_without_a_fault_nothing_is_noticed(verb, task, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(proof, "SECONDS", 600.0)  # on a busy machine, too
    words = "--init_kl_coef 0.1" if verb == "grpo" else ""
    assert run(task, tmp_path / "out", verb, words) == 0
    said = "\n".join(capsys.readouterr())
    assert not alarms_of_first_step(tmp_path / "out", said), said
    assert "checks: data, rendering" in said and (tmp_path / "out").exists() == (not verb.startswith("check"))


def test_every_fault_is_in_the_table_of_the_docs():
    table = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    for planted in FAULTS.values():
        plant, check, *_ = planted.values
        assert f"({plant.issue}) | {check or 'alarm of iteration 1'} |" in table, plant.__name__
    assert len(FAULTS) >= 15 and f"Trimtab notices all {len(FAULTS)}" in table
