"""The same optimiser step three ways: by our run, by a TRL trainer, and by sums written out over the same rows."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.train.job_run import relative_difference
from trimtab.embedded.sort_task import make_tokenizer

ROWS = 8
STEP = f"--train_batch_size {ROWS} --micro_train_batch_size 2"  # cut into four, which must not matter

Step = tuple[dict[str, Tensor], float]  # gradient of every parameter, loss


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def causal_lm(folder: Path) -> nn.Module:
    # Eager attention is the model's definition.
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def chat_ids(row: dict, answer: str) -> tuple[Tensor, int]:
    """Token ids of a prompt and one of its answers, and where the answer begins, without a chat template."""
    tokenizer = make_tokenizer()
    prompt = tokenizer.encode(f"<user>{row['prompt'][0]['content']}<assistant>")
    return torch.tensor(prompt + tokenizer.encode(row[answer][0]["content"] + "<eos>")), len(prompt)


def answer_log_probs(model: nn.Module, ids: Tensor, begin: int) -> Tensor:
    """Log-prob of each token from `begin` on."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    return torch.stack([logits[t - 1, ids[t]] - logits[t - 1].logsumexp(0) for t in range(begin, len(ids))])


def step_of(model: nn.Module, loss: Tensor) -> Step:
    model.zero_grad()
    loss.backward(retain_graph=True)  # another loss of the same log-probs may follow
    return {n: p.grad.clone() for n, p in model.named_parameters()}, loss.item()


def trl_arguments(folder: Path) -> dict:
    """What TRL's configs here have: one batch of everything, fp32, nothing cut off, nothing reported."""
    return {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": ROWS,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "max_length": None,
        "disable_tqdm": True,
    }


def trl_step(trainer_class: type, models: list[nn.Module], arguments: object, rows: list[dict]) -> Step:
    """Loss and gradient of a trainer, averaged over its batches if it has more than one."""
    tokenizer = make_tokenizer()
    trainer = trainer_class(*models, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    model, losses = trainer.model.train(), []
    for batch in trainer.get_train_dataloader():
        losses.append(trainer.compute_loss(model, trainer._prepare_inputs(batch)))
    return step_of(model, sum(losses) / len(losses))


def values_and_slopes(loss: Callable[[Tensor], Tensor], inputs: list) -> tuple[Tensor, Tensor]:
    """`loss` of one tensor of inputs, its values and its derivative."""
    x = torch.tensor(inputs, requires_grad=True)
    found = loss(x)
    found.sum().backward()
    return found.detach(), x.grad


def assert_values_and_slopes(loss: Callable[[Tensor], Tensor], inputs: list, values: list, slopes: list) -> None:
    expected = torch.tensor(values), torch.tensor(slopes)
    torch.testing.assert_close(values_and_slopes(loss, inputs), expected, atol=1e-5, rtol=1e-5)


def assert_same_function(loss: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], inputs: list) -> None:
    """In values and derivative."""
    found, expected = (values_and_slopes(one, inputs) for one in (loss, other))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def assert_same_step(ours: tuple[dict[str, Tensor], dict], expected: Step) -> None:
    """`ours` as step_gradient returns it. Some parameters' gradients are tiny, so each counts by its own size."""
    gradients, row = ours
    expected_gradients, loss = expected
    assert row["loss"] == pytest.approx(loss, abs=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    assert relative_difference(expected_gradients, gradients) < 1e-5
    for name, gradient in expected_gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(gradients[name] / scale, gradient / scale, atol=1e-5, rtol=0, msg=name)
