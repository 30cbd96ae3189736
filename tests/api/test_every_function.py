"""Every job by its function, with objects in every place that takes one; and in several processes."""

from pathlib import Path

import pytest
from datasets import Dataset

import trimtab
from tests.api.digits import early_digits
from tests.api.small import RL, SMALL
from tests.cli.conftest import STEP_END, judged_steps
from tests.cli.sft_job import write_model
from tests.train.job_run import labelled_rows, preference_rows
from trimtab.config.jobs import TRAINED
from trimtab.embedded.sort_task import make_prompts, make_rows

DATA = {
    "sft": (lambda: make_rows(4, seed=1), {}),
    "rm": (lambda: preference_rows(4), {}),
    "prm": (lambda: judged_steps(4), {"placeholder_token": STEP_END, "reward_tokens": ["+", "-"]}),
    "dpo": (lambda: preference_rows(4), {}),
    "kto": (lambda: labelled_rows(4), {}),
    "kd": (lambda: make_rows(4, seed=1), {}),
}
OF_TAIL = {"method": "repulse", "proposal_learning_rate": 1e-3, "alpha": 0.5, "target_dist_beta": -1}


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.long
@pytest.mark.parametrize("verb", TRAINED)
def test_every_function_trains_on_objects(verb, somewhere):
    write_model(somewhere / "model")
    model = loaded("model")
    if verb in DATA:
        make, options = DATA[verb]
        data = Dataset.from_list(make())
        others = {"dpo": {"reference": model}, "kto": {"reference": model}, "kd": {"teacher": model}}.get(verb, {})
        run = getattr(trimtab, verb)(model, data, **others, eval_dataset=make(), **SMALL, **options)
        assert any("eval_loss" in row for row in run.metrics)
    else:
        options = OF_TAIL if verb == "tail" else {}
        run = getattr(trimtab, verb)(model, make_prompts(4, 1), early_digits, **{**RL, "max_steps": 1}, **options)
        assert next(run.rollouts())["prompt"]
    assert run.finished and run.job == verb and run.path == Path(f"runs/{verb}-1").resolve()
    assert run.model().num_parameters() == model.num_parameters() or verb == "rm"


@pytest.mark.long
def test_several_processes_are_started_as_by_the_command_and_their_mistakes_raised(task, capfd):
    rows = make_rows(8, seed=1)
    more = {"input_key": "messages", "apply_chat_template": True, "nproc": 2}
    run = trimtab.sft(task / "model", rows, **{**SMALL, "micro_train_batch_size": 2}, **more)
    assert run.finished and len(run.metrics) == 2
    with pytest.raises(trimtab.UserError, match="no column 'nothing'"):
        trimtab.sft(task / "model", rows, **SMALL, input_key="nothing", nproc=2)
