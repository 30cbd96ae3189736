"""The SFT loss against its closed form and against TRL's own path."""

import pytest
import torch

from tests.algos.one_step import step_of, trl_arguments
from tests.samples import batch_of, random_examples
from tests.tiny import tiny_model
from trimtab.algos.supervised_losses import sft_loss_sum
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path

LENGTHS = [12, 3, 11, 7]


def ours(model, batch):
    policy = Policy(model)
    assert choose_path(policy).path == "packed"
    policy.train()
    loss = sft_loss_sum(policy(batch).log_probs_N) / batch.trained_tokens
    gradients, value = step_of(policy, loss)
    return {n.removeprefix("model."): gradient for n, gradient in gradients.items()}, value


def assert_same(mine, theirs):
    assert mine[1] == pytest.approx(theirs[1], abs=1e-5)
    for name, gradient in theirs[0].items():
        torch.testing.assert_close(mine[0][name], gradient, atol=1e-5, rtol=1e-5, msg=name)


def test_loss_and_gradients_equal_the_closed_form():
    batch = batch_of(LENGTHS)
    model = tiny_model("llama")
    total, count = 0.0, 0
    for ids, trained in zip(batch.ids_T.split(LENGTHS), batch.trained_T.split(LENGTHS)):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        for t in range(1, len(ids)):
            if trained[t]:
                total = total - (logits[t - 1, ids[t]] - logits[t - 1].logsumexp(0))
                count += 1
    assert_same(ours(tiny_model("llama"), batch), step_of(model, total / count))


def test_loss_and_gradients_equal_trls_trainer(tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from trimtab.embedded.sort_task import make_tokenizer

    examples = random_examples(LENGTHS)
    rows = Dataset.from_list(
        [{"input_ids": ids.tolist(), "completion_mask": trained.astype(int).tolist()} for ids, trained in examples]
    )
    model = tiny_model("llama")
    own = {"per_device_train_batch_size": len(LENGTHS), "completion_only_loss": True}
    arguments = SFTConfig(**trl_arguments(tmp_path) | own)
    trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=make_tokenizer())
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    expected = step_of(trainer.model, trainer.compute_loss(trainer.model.train(), inputs))
    assert_same(ours(tiny_model("llama"), batch_of(LENGTHS)), expected)
