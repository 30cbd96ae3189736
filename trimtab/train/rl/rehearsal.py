"""An RL run's rehearsal: everything that can go wrong before the first step, without the weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

from trimtab.config.jobs import RLOptions
from trimtab.distributed.device import find_device
from trimtab.distributed.launcher import Unit
from trimtab.distributed.ray.placement import table
from trimtab.models.load import fake_policy
from trimtab.plan.micro_batches import default_line, uses_default_tokens, with_default_tokens, work_of_prompts
from trimtab.rewards.build import check_columns, check_reward
from trimtab.rewards.requests import PromptBatch
from trimtab.rollout.factory import require_packed
from trimtab.rollout.sampling import request_seed
from trimtab.train.launch import load_job_tokenizer, notes, of_few_rows
from trimtab.train.rehearsal import memory_line, model_lines, one_line, usable_rows
from trimtab.train.rl.checks import (
    check_drop_last,
    check_model,
    check_places,
    check_shares,
    check_teacher,
    critic_start,
)
from trimtab.train.rl.controller import iterations_of
from trimtab.train.rl.description import layout_of_units, units_of
from trimtab.train.rl.playing import as_played, load_stores
from trimtab.train.rl.recording import Recording, as_recorded
from trimtab.train.rl.supply import order_of_prompts
from trimtab.train.rl.text import load_text

# This process is on none of its devices.
OF_A_CLUSTER = "memory: trimtab plan --nodes N --gpus M says what fits on a cluster"


def rehearse_rl(
    options: RLOptions,
    load_stores: Callable[[Any, Any], tuple] = load_stores,
    episodes: int | None = None,
    units: Callable[[Any, int], list[Unit]] = units_of,
) -> list[str]:
    """Everything that can go wrong before the first step, on a few rows and without the weights."""
    options, device = as_played(as_recorded(options)), find_device()
    described = units(options, options.processes)
    check_shares(options, described)
    placed = table(layout_of_units(options, described).rows()) if options.ray else []
    check_places(options)
    tokenizer = load_job_tokenizer(options)
    few = of_few_rows(options)
    stores, reports = load_stores(few, tokenizer)
    if options.plays and not options.prompt_data and reports["train"].rows_read == few.max_samples:
        # An environment that has as many rows as it is asked for has as many as the run will ask for.
        reports["train"].rows_available = min(options.env_rows, options.max_samples)
    if options.pretrain_data:
        load_text(few, tokenizer)
    check_columns(stores, options)
    model = fake_policy(options)
    check_model(model, options, stores)
    if options.teacher_model:
        check_teacher(options, tokenizer)
    note = critic_start(options, tokenizer)[1] if options.estimator.critic else None
    rewarded = check_reward(options, device, tokenizer, stores["train"])
    played: list[str] = []
    if options.plays:
        from trimtab.server.environment_factory import check_environment

        first = PromptBatch.of(stores["train"], [(0, request_seed(options.seed, 0))], rewarded=True)
        plain = not options.apply_chat_template
        played = check_environment(options, first.tasks()[0], first.ids[0], tokenizer, plain=plain)
    order = order_of_prompts(len(stores["train"]), options, episodes or options.num_episodes)
    replayed = None
    if options.replay and (recording := Recording.of(options)):
        # The run itself knows all prompts, and asks for more.
        recording.check_holds(order.steps, iterations_of(order, options))
        replayed = recording.outlived(options)
    prompts, about = usable_rows(reports["train"], options.max_samples, len(stores["train"]))
    whole = dataclasses.replace(order, samples=prompts)
    if not about:
        check_drop_last(whole, options)
    described_model = model_lines(model, options, device)
    if not options.uses_vllm:
        require_packed(model)
    cut = []
    if model.path == "packed" and uses_default_tokens(options, device):
        options = with_default_tokens(options, device)
        cut = [default_line(options)]
    return [
        f"device: {device.name}",
        *placed,
        *notes(options, device),
        *(line for line in (note, replayed) if line),
        *described_model,
        f"engine: {'vLLM' if options.uses_vllm else 'built-in'}",
        f"data: {reports['train'].in_files:,} prompts give {'about ' if about else ''}"
        f"{iterations_of(whole, options):,} iterations of {options.updates_per_iteration} updates",
        f"first prompt, as the policy reads it: {one_line(stores['train'].text(0))}",
        *rewarded,
        *played,
        *cut,
        OF_A_CLUSTER if options.ray else memory_line(options, device, lambda: work_of_prompts(options, stores)),
    ]
