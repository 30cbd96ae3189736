"""Commands for reward models, PRM, DPO, KTO and merging that people have in their scripts: pasted, with local names.

Every command runs as written, but for the names of models, data and folders, and for a number of rows that gives two
steps.
"""

import json
import shlex

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.cli.sft_job import STEP_END, write_rows
from tests.cli.test_sft_documents import KEY, assert_key_is_nowhere
from tests.config.test_documented_commands import COMMANDS
from tests.train.job_run import labelled_rows, preference_rows
from trimtab.cli import lora_combiner, train_dpo, train_kto, train_prm, train_rm
from trimtab.embedded.sort_task import make_rows, prompt_of, reference_of

pytestmark = pytest.mark.usefixtures("wandb_at_home")

# What the comments under the commands offer.
IN_COMMENTS = {
    "ascend small dpo": ["--ipo", "--label_smoothing 0.1", "--ref_offload", "--packing_samples", "--nll_loss_coef 0.2"],
    "ascend small rm": ["--packing_samples", "--value_prefix_head score"],
}
MERGE = (
    "--model_path model --lora_path ./checkpoint/rm --output_path ./checkpoint/llama-3-8b-rm-combined --is_rm --bf16"
)
MODULES = {"rm": train_rm, "prm": train_prm, "dpo": train_dpo, "kto": train_kto}


def rows_of(verb: str, count: int, words: list[str]) -> list[dict]:
    if verb in ("rm", "dpo"):
        # Whole conversations on both sides, as in the data set that the documents name.
        return [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in preference_rows(count)]
    if verb == "kto":
        judged = [(row["prompt"][0]["content"], row["completion"][0]["content"], row) for row in labelled_rows(count)]
        return [{"instruction": asked, "response": said, "score": int(row["label"])} for asked, said, row in judged]
    label = words[words.index("--label_key") + 1]
    return [
        {
            "input": prompt_of(row) + "".join(f" {digit} {STEP_END}\n" for digit in reference_of(row)),
            label: ["+" if int(digit) % 2 else "-" for digit in reference_of(row)],
        }
        for row in make_rows(count, seed=1)
    ]


@pytest.fixture
def pasted(job, place):
    """A document's command: its verb's job, its words, and rows for two steps, the second a small one."""

    def paste(name: str):
        verb, text = name.split()[-1], COMMANDS[name][0]
        text = text.replace("owner/model", "model").replace("owner/data", "rows.jsonl")
        words = shlex.split(text.replace("{wandb_token}", KEY))
        size = int(words[words.index("--train_batch_size") + 1])
        write_rows(place / "rows.jsonl", rows_of(verb, size + 8, words))
        return job(verb), words, place / words[words.index("--save_path") + 1], size

    return paste


@pytest.mark.short(2)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_documents_command_passes_a_dry_run_and_trains_two_steps(pasted, place, name):
    command, words, run, size = pasted(name)
    before = set(place.iterdir())
    rehearsed = command(*words, "--dry_run")
    assert rehearsed.code == 0 and "parameters" in rehearsed.out, rehearsed.err
    assert set(place.iterdir()) == before
    ran = command(*words)
    assert ran.code == 0, ran.err
    rows = command.rows(run)
    assert [(row["step"], row["samples"]) for row in rows] == [(1, size), (2, 8)]
    assert (run / "model.safetensors").exists() and (run / "report.html").exists()
    assert bool(list(run.glob("wandb/offline-run-*/*.wandb"))) == ("--use_wandb" in words)
    for output in (rehearsed, ran):
        assert_key_is_nowhere(place, output)


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "name, option", [(name, option) for name, options in IN_COMMENTS.items() for option in options]
)
def test_the_options_in_their_comments(pasted, name, option):
    command, words, run, _ = pasted(name)
    assert command(*words, *option.split(), "--dry_run").code == 0
    assert command(*words, *option.split()).code == 0
    assert len(command.rows(run)) == 2


@pytest.mark.parametrize("name", ["ascend dpo", "ascend kto", "ascend small prm", "ascend small rm"])
def test_the_modules_can_be_started_by_themselves(pasted, name):
    command, words, run, _ = pasted(name)
    assert MODULES[command.verb].main([*words, "--max_samples", "4"]) == 0
    assert len(command.rows(run)) == 1


@pytest.mark.parametrize("name", ["chinese rm", "readme rm"])
def test_an_adapter_of_the_reward_model_is_merged_as_the_documents_do(pasted, place, name, capsys):
    command, words, run, _ = pasted(name)
    words = [*words[:-2], "--lora_rank", "4", "--learning_rate", "1e-2", "--max_samples", "32"]  # without wandb
    assert command(*words, "--train_batch_size", "8", "--micro_train_batch_size", "1").code == 0
    assert not (run / "model.safetensors").exists()
    assert lora_combiner.main([*shlex.split(MERGE), "--dry_run"]) == 0
    merged = place / "checkpoint" / "llama-3-8b-rm-combined"
    assert not merged.exists()
    assert lora_combiner.main(shlex.split(MERGE)) == 0
    assert capsys.readouterr().out.endswith("model    checkpoint/llama-3-8b-rm-combined/\n")
    assert {value.dtype for value in load_file(merged / "model.safetensors").values()} == {torch.bfloat16}
    told = json.loads((run / "rewards.json").read_text())
    alone = AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32).eval()
    assert (alone.config.mean, alone.config.std) == (told["mean"], told["std"])
    base = AutoModelForSequenceClassification.from_pretrained(place / "model", num_labels=1)
    base.config.pad_token_id = alone.config.pad_token_id
    adapted = PeftModel.from_pretrained(base, run).eval()
    ids = command.batches[0].sequence(0)[None]
    with torch.no_grad():
        difference = (alone(ids).logits - adapted(input_ids=ids).logits).abs().item()
        assert difference < 0.03, "the rounding of bf16, and no more"
