"""RePULSe's 31 training commands, pasted, with names of things that exist here: each trains two updates."""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaForSequenceClassification

from tests import warm
from tests.cli.test_attack import DOCUMENTED as ATTACK
from tests.config.test_repulse_aliases import COMMANDS
from tests.rewards.encoder import write_encoder
from tests.tiny import tiny_model
from tests.train.job_run import write_rows
from trimtab.cli.main import main
from trimtab.embedded.sort_task import make_prompts, make_tokenizer
from trimtab.evaluate.tail_risk import read_analytic, read_held_out

NAMES = {
    "--pretrain": ("distilgpt2", "SmolLM-135M-Instruct", "Llama-3.2-1B-Instruct"),
    "--reward_pretrain": ("ToxicityModel", "reward-model-deberta-v3-large-v2", "Skywork-Reward-V2-Llama-3.2-1B"),
}
UPDATES = 2


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """Tiny models under the documents' names."""
    folder = tmp_path_factory.mktemp("things")
    tokenizer = make_tokenizer()
    for name, family in zip(NAMES["--pretrain"], ("gpt2", "llama", "llama")):
        tiny_model(family, vocab_size=len(tokenizer)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name in NAMES["--reward_pretrain"][:2]:
        write_encoder(folder / name)
    config = tiny_model("llama", vocab_size=len(tokenizer), pad_token_id=0).config
    config.num_labels = 1
    judge = folder / NAMES["--reward_pretrain"][2]
    LlamaForSequenceClassification(config).save_pretrained(judge)
    tokenizer.save_pretrained(judge)
    return folder


def pasted(command: str, things: Path, out: Path, episodes: int) -> list[str]:
    """The command with names and folders replaced, and rows for two updates."""
    words = shlex.split(command)
    given = {word: words[place + 1] for place, word in enumerate(words[:-1]) if word.startswith("--")}
    toy = "--fit_steps" in given
    prompts = int(given["--rollout_batch_size"])
    rows = [{"prompt": row["input"]} for row in make_prompts(1 if toy else UPDATES * prompts // episodes, 1)]
    changes = {"--save_path": f"{out}/runs", "--ckpt_path": f"{out}/runs", "--save_info_path": f"{out}/info"}
    for flag in ("--pretrain", "--reward_pretrain", "--prompt_data", "--heldout_prompt_data"):
        if flag in given:
            changes[flag] = str(things / given[flag].rsplit("/", 1)[-1])
    for flag in ("--prompt_data", "--heldout_prompt_data"):
        if flag in given:
            changes[flag] = str(out / given[flag].rsplit("/", 1)[-1])
            Path(changes[flag]).mkdir()
            write_rows(Path(changes[flag]) / "train.jsonl", rows if flag == "--prompt_data" else rows[:3])
    if toy:
        flag = "--num_episodes" if "--do_harmlessness_training" not in words else "--harmlessness_training_num_episodes"
        changes |= {"--fit_steps": str(UPDATES), flag: "1"}
    for flag, value in changes.items():
        words[words.index(flag) + 1] = value
    # What the documents' classifier of texts reads is known by its name on the hub.
    return [*words, *("--bad_token_ids 7 8 9 --reward_input text" if toy else "").split()]


def start(words: list[str]) -> None:
    from trimtab.cli.train_ppo import main

    raise SystemExit(main(words))


def train(number: int, things: Path, out: Path) -> Path:
    """The folder that a documented command leaves."""
    command, *_, episodes = COMMANDS[number]
    log = out / "log"
    assert warm.run([], prepare=partial(start, pasted(command, things, out, episodes)), log=log) == 0, log.read_text()
    (folder,) = (out / "runs").glob("rlhf_*actor")
    return folder


FEW = (0, 4, 20, 27)
ALL = [number if number in FEW else pytest.param(number, marks=pytest.mark.long) for number in range(31)]


@pytest.mark.short(2)
@pytest.mark.parametrize("number", ALL)
def test_a_documented_command_trains_two_updates_and_leaves_its_files(things, tmp_path, number):
    command, method, *_ = COMMANDS[number]
    folder = train(number, things, tmp_path)
    name = folder.name.removesuffix("_actor").removesuffix("_harml")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["step"]] == list(range(1, UPDATES + 1))
    assert ("proposal_loss" in rows[-1]) == (method == "repulse") == (folder / "proposal").is_dir()
    info = tmp_path / "info"
    assert len(torch.load(info / f"f_q_rew_kltoprior_ent_{name}", weights_only=True)[1]) == UPDATES
    if "--analytic_bad_word_calc" in command:
        analytic = read_analytic(info / f"analyticlogprob_rewsample_{name}")
        assert [len(values) for values in vars(analytic).values()] == [1 + UPDATES] * 3
        assert all(value < 0 for value in analytic.log_bad) and len(set(analytic.log_bad)) == 1 + UPDATES
    else:
        group = 5 if "/one" in command else 4
        assert len(read_held_out(info / f"info_eval_{name}").rewards) == 3 * group
    if "--save_negdata" in command:
        assert (tmp_path / "runs" / f"neg_data_{name}_thr-5.0.pkl").exists()


def attack(words: list[str]) -> None:
    from trimtab.cli.evaluate_gcg_sz import main

    raise SystemExit(main(words))


@pytest.mark.short(1)
@pytest.mark.parametrize("number", [10, 20])
def test_the_documented_attack_takes_what_a_documented_command_wrote_and_the_figure_takes_both(
    things, tmp_path, number, capsys
):
    folder = train(number, things, tmp_path)
    (tmp_path / "goals.csv").write_text("goal,target\nsort 12,Sure\nsort 31,Me\n")
    words = shlex.split(ATTACK.format(ckpt=folder, goals=tmp_path / "goals.csv"))
    for flag, names in NAMES.items():
        words[words.index(flag) + 1] = str(things / names[1])
    few = "--gcg_steps 2 --gcg_search_width 8 --gcg_topk 8 --samples_per_prompt 5 --max_new_tokens 4"
    log = tmp_path / "attack.log"
    assert warm.run([], prepare=partial(attack, [*words, *few.split()]), log=log) == 0, log.read_text()
    found = folder.parent / f"gcg_eval_{folder.name}.jsonl"
    assert [len(json.loads(line)["after"]["rewards"]) for line in found.read_text().splitlines()] == [5, 5]

    run = folder.name.removesuffix("_actor").removesuffix("_harml")
    manifest = {"info": "info", "checkpoints": "runs", "threshold": -4, "level": 0.1}
    manifest["methods"] = [{"label": "it", "run": run, "seeds": [1]}]
    (tmp_path / "figure.json").write_text(json.dumps(manifest))
    for y in "bad", "cvar", "gcg":
        assert main(["plot", "frontier", str(tmp_path / "figure.json"), "--y", y]) == 0, capsys.readouterr().err
