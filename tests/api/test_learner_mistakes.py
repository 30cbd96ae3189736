"""What cannot be meant is one exception, in one line, and nothing has moved."""

import numpy as np
import pytest
from transformers import BertConfig, BertModel, LlamaForSequenceClassification

import trimtab
from tests.api.learners import PROMPTS, assert_same, judged, learner, weights
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def one():
    return learner()


def changed(samples, **fields):
    for name, value in fields.items():
        setattr(samples[1], name, value)
    return samples


MASK = np.array([False, True, True])
MISTAKES = {
    "data is empty": lambda one, data: one.forward_backward([]),
    r"data is one Sample; give a list": lambda one, data: one.log_probs(data[0]),
    r"data\[0\] is of type dict": lambda one, data: one.log_probs([{}]),
    r"data\[1\]\.advantages has shape \(1,\)": lambda one, data: one.forward_backward(changed(data, advantages=[1.0])),
    r"data\[1\]\.advantages has a value that is not finite": lambda one, data: one.forward_backward(
        changed(data, advantages=float("nan"))
    ),
    r"data\[1\]\.advantages is not set, .*trimtab.advantages": lambda one, data: one.forward_backward(
        changed(data, advantages=None)
    ),
    r"data\[1\]\.advantages must be numbers": lambda one, data: one.forward_backward(changed(data, advantages="high")),
    r"data\[1\]\.trained has shape \(3,\)": lambda one, data: one.forward_backward(changed(data, trained=MASK)),
    r"data\[1\]\.trained marks the first token": lambda one, data: one.log_probs(
        changed(data, trained=np.ones(len(data[1].ids), bool))
    ),
    r"data\[1\]\.ids has a token outside": lambda one, data: one.log_probs(changed(data, ids=[99] * 3, trained=MASK)),
    r"data\[1\] has 300 tokens, and the model's context is 256": lambda one, data: one.log_probs(
        changed(data, ids=[5] * 300, trained=np.arange(300) > 3)
    ),
    "temperatures 0.5, 1": lambda one, data: one.log_probs(changed(data, temperature=0.5)),
    r"data\[0\]\.reference is not set, .*reference=True": lambda one, data: one.forward_backward(data, kl_coef=0.1),
    "unknown loss 'pppo'; did you mean 'ppo'": lambda one, data: one.forward_backward(data, "pppo"),
    "no setting 'eps_clp'; did you mean 'eps_clip'": lambda one, data: one.forward_backward(data, eps_clp=0.1),
    "token_reduction is 'mean'": lambda one, data: one.forward_backward(data, token_reduction="mean"),
    "eps_clip is -1": lambda one, data: one.forward_backward(data, eps_clip=-1),
    "loss is of type int": lambda one, data: one.forward_backward(data, 3),
    "return loss, {}": lambda one, data: one.forward_backward(data, lambda inputs: inputs.log_probs_N),
    "the loss has no gradient": lambda one, data: one.forward_backward(
        data, lambda inputs: (inputs.log_probs_N.detach().sum(), {})
    ),
    "group is 1, and loss 'dpo' sees 2 samples": lambda one, data: one.forward_backward(data, "dpo", group=1),
    "label_smoothing is 2": lambda one, data: one.forward_backward(data, "dpo", label_smoothing=2),
    "eps_clip_low_high is 0.2": lambda one, data: one.forward_backward(data, eps_clip_low_high=0.2),
    "the loss's figure 'all' must be one number": lambda one, data: one.forward_backward(
        data, lambda inputs: (inputs.log_probs_N.sum(), {"all": inputs.log_probs_N})
    ),
    r"data\[1\]: ids and trained must be": lambda one, data: one.log_probs(changed(data, ids=[[1], [1, 2]])),
    "temperature is no number": lambda one, data: one.log_probs(changed(data, temperature=None)),
    "group is 5, and there are 12 samples": lambda one, data: one.forward_backward(data, group=5),
    "nothing was gathered": lambda one, data: one.optim_step(),
    "prompts is one prompt": lambda one, data: one.sample("word"),
    "prompts is one list of token ids": lambda one, data: one.sample([1, 2, 3]),
    "prompts is empty": lambda one, data: one.sample([]),
    r"prompts\[0\] is a text, and the Learner has no tokenizer": lambda one, data: one.sample(["word"]),
    r"prompts\[1\] has 256 tokens, and the model's context is 256": lambda one, data: one.sample([[5], [5] * 256]),
    r"prompts\[0\] must be a text, a list of messages": lambda one, data: one.sample([None]),
    "outside the model's vocabulary": lambda one, data: one.sample([[61]]),
    "no setting 'temprature'; did you mean 'temperature'": lambda one, data: one.sample(PROMPTS, temprature=1),
    "temperature is -1": lambda one, data: one.sample(PROMPTS, temperature=-1),
    "temperature takes a number, not 'nan'": lambda one, data: one.sample(PROMPTS, temperature=float("nan")),
    "no setting 'top_log_probs'": lambda one, data: one.sample(PROMPTS, top_log_probs=3),
    "top_k takes a whole number": lambda one, data: one.sample(PROMPTS, top_k=1.5),
    "logit_bias takes a dict": lambda one, data: one.sample(PROMPTS, logit_bias=[1]),
    "logit_bias takes token ids below 61": lambda one, data: one.sample(PROMPTS, logit_bias={61: 1.0}),
    "forbidden_tokens takes token ids below 61": lambda one, data: one.sample(PROMPTS, forbidden_tokens=[99]),
    "seeds must be a list of whole numbers": lambda one, data: one.sample(PROMPTS, seeds=1),
    "n is 0": lambda one, data: one.sample(PROMPTS, 0),
    "2 seeds for 3 prompts": lambda one, data: one.sample(PROMPTS, seeds=[1, 2]),
    "play needs a tokenizer": lambda one, data: one.play("trimtab:guess", 1),
    "no limit 'max_turn'; did you mean 'max_turns'": lambda one, data: one.play("trimtab:guess", 1, max_turn=1),
    "serve needs a tokenizer": lambda one, data: one.serve().__enter__(),
    "holds no saved Learner": lambda one, data: trimtab.Learner.load("nowhere"),
    "holds something else": lambda one, data: one.save("/proc"),
    "no option 'lora_rnk'; did you mean 'lora_rank'": lambda one, data: learner(lora_rnk=1),
    "no option 'nproc'": lambda one, data: learner(nproc=2),
    "max_norm is -1": lambda one, data: learner(max_norm=-1.0),
    "max_norm: takes a number, not 'much'": lambda one, data: learner(max_norm="much"),
    "seed: takes a whole number, not": lambda one, data: learner(seed=1.5),
    "bf16: takes True or False": lambda one, data: learner(bf16="perhaps"),
    "model is of type dict": lambda one, data: trimtab.Learner({}),
    "LlamaForSequenceClassification, which is no causal": lambda one, data: trimtab.Learner(
        LlamaForSequenceClassification(tiny_model().config)
    ),
    "BertModel, which is no causal": lambda one, data: trimtab.Learner(
        BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    ),
    "cannot find the model folder|does not exist|no such": lambda one, data: trimtab.Learner("./not/there"),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(one, words):
    data, before = judged(one), weights(one)
    with pytest.raises(trimtab.Error, match=words) as told:
        MISTAKES[words](one, data)
    assert "\n" not in str(told.value)
    assert_same(before, weights(one))
    with pytest.raises(trimtab.UserError, match="nothing was gathered"):
        one.optim_step()


def test_a_bad_rate_or_divisor_leaves_what_was_gathered(one):
    one.forward_backward(judged(one))
    rates, divisors = (-1.0, float("nan"), "fast"), ("samples", 0, None, float("inf"))
    for wrong in [{"learning_rate": rate} for rate in rates] + [{"per": divisor} for divisor in divisors]:
        with pytest.raises(trimtab.UserError, match=r"learning_rate is|per is"):
            one.optim_step(**wrong)
    assert one.optim_step(learning_rate=0.0)["applied"]
