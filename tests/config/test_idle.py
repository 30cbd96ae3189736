"""Every option has its effect, or says in one line that it has none, or is refused."""

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.config.every_job import EVERY_JOB, RL, SFT, lines_of
from trimtab.cli.main import VERBS
from trimtab.config.jobs import JOBS, SFTOptions
from trimtab.config.option import Option, Options, options_of
from trimtab.config.parser import parse
from trimtab.config.resolved_config import hardware_problems, settled_and_checked
from trimtab.config.training_options import CheckpointOptions
from trimtab.errors import UserError

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "trimtab" / "config"
OF_OPTIONS = {"options", "settings", "chosen", "its_options"}
"""Names under which code holds options, or a part of them."""

OF_THE_CALL = {"config", "local_rank"}
"""Read by the parser, and written by launchers."""
SAME_EITHER_WAY = {("rm", "loss")}
"""Two spellings of one function."""


# ---- which options the code of a job reads


def file_of(module: str) -> Path | None:
    place = ROOT / module.replace(".", "/")
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@functools.cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported(path: Path) -> frozenset[Path]:
    """The files of ours that a file imports, at its top or inside a function."""
    names = []
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    # Of the package itself only the version is read: what it offers is imported by whoever asks for it.
    return frozenset(found for name in names if name.startswith("trimtab.") and (found := file_of(name)))


def reached(start: str) -> set[Path]:
    """The files that a job's own module leads to; those of config/ only say what options there are."""
    todo, seen = [file_of(start)], set()
    while todo:
        path = todo.pop()
        if path not in seen and CONFIG not in path.parents:
            seen.add(path)
            todo += imported(path)
    return seen


def reads(tree: ast.AST, holders: set[str]) -> Iterator[str]:
    """Names that are read from something that holds options."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            holder = node.value
            name = getattr(holder, "id", None) or getattr(holder, "attr", None)
            if name in holders:
                yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "getattr" and len(node.args) > 1:
            if isinstance(node.args[1], ast.Constant):
                yield str(node.args[1].value)
        elif isinstance(node, ast.ClassDef) and node.name.endswith("Settings"):
            # Copied out of the options by name (data/dataset.py).
            yield from (field.target.id for field in node.body if isinstance(field, ast.AnnAssign))


@functools.cache
def read_by(job_class: type) -> frozenset[str]:
    modules = [VERBS[job_class.verb][0].partition(":")[0]]
    if issubclass(job_class, CheckpointOptions):
        modules.append(f"trimtab.train.{job_class.trainer}")  # which the command imports by name
    elif job_class.verb == "generate":
        modules.append("trimtab.evaluate.generation")  # likewise
    files = {path for module in modules for path in reached(module)}
    return frozenset().union(*map(read_in, files), *map(settled_by, job_class.__mro__))


@functools.cache
def read_in(path: Path) -> frozenset[str]:
    return frozenset(reads(syntax(path), OF_OPTIONS))


@functools.cache
def settled_by(group: type) -> frozenset[str]:
    """Options that become part of others: read by a group's settle, its properties and what these call."""
    if not group.__module__.startswith("trimtab.config"):
        return frozenset()
    tree = next(
        node
        for node in ast.walk(syntax(file_of(group.__module__)))
        if isinstance(node, ast.ClassDef) and node.name == group.__name__
    )
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    asking = {"check", "idle", "asks", "changed"}
    return frozenset(
        name
        for method in methods
        if method.name not in asking and not method.name.startswith(("_check", "_about"))
        for name in reads(method, {"self"})
    )


# ---- what the others say


GIVEN = {
    **{"pretrain": "a/b", "dataset": "a/b", "prompt_data": "a/b", "reward_pretrain": "a/b", "teacher_model": "a/b"},
    **{
        "placeholder_token": "#",
        "output_path": "rows.jsonl",
        "model_path": "a/b",
        "lora_path": "a/c",
        "file_path": "a/b",
    },
    **{"reward_threshold": 0.0},
}
"""Enough of every job to be checked."""


def enough(job_class: type) -> dict[str, Any]:
    known = options_of(job_class)
    needed = {name for name, option in known.items() if option.required}
    return {
        name: value
        for name, value in GIVEN.items()
        if name in needed | {"reward_pretrain", "reward_threshold"} & known.keys()
    }


def another_value(option: Option) -> Any:
    """A value that is not the default and within the limits."""
    choices = [choice for choice in option.limits.choices if choice != option.default]
    one = {bool: True, int: 3, float: 0.75, str: "other"}[option.kind]
    if option.kind is bool:
        one = not option.default
    one = choices[0] if choices else one
    return one if option.count is None else (one,) * (option.count or 2)


def says_a_word(job_class: type, option: Option) -> bool:
    """Whether a line or a refusal follows that names the option, if the user sets it."""
    try:
        options, lines = settled_and_checked(job_class(**enough(job_class) | {option.name: another_value(option)}))
        lines += hardware_problems(options, lambda: 0)
    except UserError as error:
        lines = [str(error)]
    return any(re.search(rf"--{option.name}\b", line) for line in lines)


def silent(job_class: type) -> list[str]:
    """The job's options that none of its code reads and that nobody says a word about."""
    return [
        name
        for name, option in options_of(job_class).items()
        if name not in read_by(job_class) | OF_THE_CALL
        and not option.always
        and (job_class.verb, name) not in SAME_EITHER_WAY
        and not says_a_word(job_class, option)
    ]


@pytest.mark.parametrize("job_class", EVERY_JOB)
def test_every_option_is_read_by_its_job_or_says_that_it_has_no_effect(job_class):
    assert silent(job_class) == []


@pytest.mark.parametrize("job_class", EVERY_JOB)
def test_what_is_declared_to_have_no_effect_says_so(job_class):
    for name in {name for group in job_class.__mro__ for name in vars(group).get("idle_here", {})}:
        assert says_a_word(job_class, options_of(job_class)[name]), name


def test_the_walk_sees_an_option_that_nothing_reads_and_one_that_only_other_jobs_read():
    class More(Options):
        """More"""

        unheard_of: int = 0
        """Nothing reads it."""
        step_separator: str | None = None
        """Read, but not by SFT."""

    class Probe(SFTOptions, More):
        """Probe"""

    assert silent(Probe) == ["unheard_of", "step_separator"]
    Probe.idle_here = {"unheard_of": "in a probe", "step_separator": "in a probe"}
    assert silent(Probe) == []


# ---- what has an effect in some company only

LEAST = {
    **dict.fromkeys(("ppo", "grpo", "dapo"), RL),
    **{"sft": SFT, "chat": "--pretrain a/b", "serve-rm": "--reward_pretrain a/b"},
    "generate": f"{SFT} --output_path x.jsonl",
}
"""The words that each verb needs."""

VERIFIED = "--reward_pretrain None --reward_verifier exact"
BUDGET = "--packing_samples --train_max_tokens_per_gpu 4096"
WARMUP = "--lr_scheduler constant --lr_warmup_ratio 0.03"
RANGE = "--dynamic_filtering_reward_range 0 2 --dynamic_filtering_rule differing"

# (verb, words, what is said of them, words with which it is not said)
CASES = [
    ("ppo", f"{VERIFIED} --ref_reward_offload --init_kl_coef 0", "--ref_reward_offload has no effect: there is no", RL),
    ("ppo", "--controller_apart", "--controller_apart has no effect in one process", "--nproc 2"),
    *(
        (verb, flag, f"{flag.split()[0]} has no effect without {needed}", company)
        for verb, flag, needed, company in (
            ("ppo", "--eval_steps 5", "--eval_dataset", "--eval_dataset a/b"),
            ("ppo", "--eval_temperature 0.6", "--eval_dataset", "--eval_dataset a/b"),
            ("ppo", "--eval_n_samples_per_prompt 4", "--eval_dataset", "--eval_dataset a/b"),
            ("ppo", "--eval_split train", "--eval_dataset", "--eval_dataset a/b"),
            ("ppo", "--eval_max_samples 5", "--eval_dataset", "--eval_dataset a/b"),
            ("sft", "--eval_split train", "--eval_dataset", "--eval_dataset a/b"),
            ("sft", "--ring_head_stride 2", "--ring_attn_size", "--ring_attn_size 2"),
            ("chat", "--csft_prompt good", "--enable_csft", "--enable_csft"),
            ("sft", "--wandb_project mine", "--use_wandb", "--use_wandb offline"),
            ("sft", "--wandb_run_name mine", "--use_wandb", "--use_tensorboard x"),
            (
                "ppo",
                "--vllm_generate_batch_size 8",
                "--dynamic_filtering",
                "--dynamic_filtering --n_samples_per_prompt 2",
            ),
            ("grpo", "--dynamic_filtering_rule differing", "--dynamic_filtering", "--dynamic_filtering"),
            ("grpo", "--dynamic_filtering_batches 3", "--dynamic_filtering", "--dynamic_filtering"),
            ("dapo", RANGE, "--dynamic_filtering_rule mean", "--dynamic_filtering_rule mean"),
            ("ppo", "--kl_clip 10", "--use_kl_loss", "--use_kl_loss --kl_estimator k3"),
            ("ppo", "--kl_estimator k1 --init_kl_coef 0", "--init_kl_coef", "--init_kl_coef 0.1"),
            ("ppo", f"--micro_reward_batch_size 2 {VERIFIED}", "--reward_pretrain", "--reward_pretrain a/b"),
            ("ppo", "--vllm_tensor_parallel_size 1", "", None),
            ("ppo", "--overlap_comm", "--zero_stage 3", "--zero_stage 3"),
            ("generate", "--micro_batch_size 16", "a reward model", "--reward_pretrain a/b"),
        )
    ),
    *(
        (verb, flag, f"{flag.split()[0]} has no effect without --placeholder_token", None)
        for verb in ("ppo", "serve-rm")
        for flag in ("--reward_tokens + -", "--step_reward min", "--step_separator x")
    ),
    *(
        (verb, flag, f"{flag} has no effect without --save_steps", "--save_steps 5 --save_hf_ckpt")
        for verb in ("ppo", "sft")
        for flag in ("--save_hf_ckpt", "--disable_ds_ckpt")
    ),
    *(
        ("ppo", f"--policy_loss_type cispo {flag}", f"{flag.split()[0]} has no effect as a lower", company)
        for flag, company in (
            ("--eps_clip 0.2", "--policy_loss_type ppo"),
            ("--eps_clip_low_high 0.2 0.3", "--policy_loss_type gspo"),
        )
    ),
    *(
        (verb, f"{other} {flag}", f"{flag.split()[0]} has no effect beside {named}", company)
        for verb, other, named, flag, company in (
            (
                "ppo",
                "--use_dynamic_batch",
                "--use_dynamic_batch",
                "--micro_train_batch_size 4",
                "--use_dynamic_batch False",
            ),
            (
                "ppo",
                "--use_dynamic_batch",
                "--use_dynamic_batch",
                "--micro_rollout_batch_size 8",
                "--use_dynamic_batch False",
            ),
            (
                "ppo",
                "--use_dynamic_batch",
                "--use_dynamic_batch",
                "--micro_logprob_batch_size 2",
                "--use_dynamic_batch False",
            ),
            (
                "sft",
                BUDGET,
                "--train_max_tokens_per_gpu",
                "--micro_train_batch_size 8",
                "--train_max_tokens_per_gpu None",
            ),
            ("sft", "--fit_memory", "--fit_memory", "--micro_train_batch_size 8", "--fit_memory False"),
            (
                "ppo",
                "--mismatch_correction tis",
                "--mismatch",
                "--enable_vllm_is_correction",
                "--mismatch_correction None",
            ),
            *(
                (
                    verb,
                    "--apply_chat_template",
                    "--apply_chat_template",
                    "--input_template x{}",
                    "--apply_chat_template False",
                )
                for verb in ("ppo", "sft", "chat")
            ),
        )
    ),
    ("sft", WARMUP, "--lr_warmup_ratio has no effect with", "--lr_scheduler constant_with_warmup"),
    ("sft", WARMUP, "--lr_warmup_ratio has no effect with", "--lr_warmup_ratio 0"),
    (
        *("sft", "--pretrain_mode --input_template x{}"),
        *("--input_template has no effect with --pretrain_mode", "--pretrain_mode False"),
    ),
    ("ppo", "--max_len 4096", "--max_len has no effect in RL", None),
    ("ppo", "--packing_samples", "--packing_samples has no effect in RL", None),
    ("serve-rm", "--packing_samples", "--packing_samples has no effect in a server", None),
    *(
        ("ppo", f"--replay rec {flag}", f"{flag.split()[0]} without effect: --replay samples nothing", company)
        for flag, company in (
            *(
                (flag, "--replay None")
                for flag in ("--rollout_slots 256", "--rollout_kv_tokens 9999", "--weight_only_int8")
            ),
            *((flag, "--replay None") for flag in ("--top_p 1.0", "--no_shuffle", "--generate_min_len 3")),
            *(("--repetition_penalty 1.1", company) for company in ("--replay None", "--eval_dataset a/b")),
            ("--rollout_slots 8", "--eval_dataset a/b"),
        )
    ),
    (
        *("grpo", "--running_reward_norm"),
        "--running_reward_norm has no effect with --advantage_estimator group_norm: it standardises",
        "--advantage_estimator rloo",
    ),
    (
        *("grpo", "--micro_value_batch_size 2"),
        "--micro_value_batch_size without effect: --advantage_estimator group_norm has no critic",
        "--advantage_estimator gae",
    ),
    ("ppo", "--vllm_num_engines 1 --vllm_tensor_parallel_size 2", "--vllm_tensor_parallel_size set aside", None),
    (
        *("ppo", "--vllm_enable_sleep False"),
        *("--vllm_enable_sleep False has no effect on the built-in engine", "--rollout_engine vllm"),
    ),
    (
        *("serve-rm", "--reward_pretrain None --reward_verifier gsm8k --bf16"),
        *("--bf16 has no effect with --reward_verifier", "--reward_verifier None --reward_pretrain a/b"),
    ),
]


@pytest.mark.parametrize("verb, words, line, company", CASES)
def test_an_option_without_effect_says_so_and_where_it_has_one_does_not(verb, words, line, company):
    words = f"{LEAST[verb]} {words}"
    assert [said for said in lines_of(verb, words) if line in said], lines_of(verb, words)
    if company is not None:
        assert not [said for said in lines_of(verb, f"{words} {company}") if line in said]


@pytest.mark.parametrize("verb, words, line, company", CASES)
def test_what_the_user_did_not_set_is_not_spoken_of(verb, words, line, company):
    options = parse(JOBS[verb], f"{LEAST[verb]} {words}".split())
    assert not settled_and_checked(dataclasses.replace(options, given=frozenset()))[1]
