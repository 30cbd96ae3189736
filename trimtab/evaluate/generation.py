"""`trimtab generate`: answers to many prompts by the built-in engine or by vLLM, each scored if a reward is named.

Every prompt draws from a stream of its own, made of the seed and its row, so the answers depend neither on the number
of processes nor on where an earlier run was stopped. A row of the output has the prompt as trainers take it (`input`:
the text that the model read, or the conversation), the answer (`output`) and its `reward`.
"""

import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset

from trimtab.config.jobs import ChatOptions, GenerateOptions, PlayOptions
from trimtab.config.resolved_config import shown
from trimtab.data.chat_template import in_template
from trimtab.data.data_files import located, locations_of
from trimtab.data.dataset import rows_hash, settings_of, up_to_answer
from trimtab.data.formats import Message, SupervisedKeys, SupervisedRecord, find_supervised_columns, read_supervised
from trimtab.data.prompts import PromptDataset, PromptReport, build_prompt_dataset
from trimtab.data.rendering import AnswerRenderer, as_messages, tokenize_renderings
from trimtab.data.sources import load_rows
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device, find_device
from trimtab.distributed.process_group import World, find_world, leave_world, share_signals
from trimtab.distributed.random_state import seed_everything
from trimtab.errors import UserError
from trimtab.evaluate.journal import Journal, work_through, write_rows
from trimtab.interrupts import StopRequest
from trimtab.models.load import fake_policy_with_fingerprint, load_frozen_policy
from trimtab.models.policy import Policy
from trimtab.models.pretrained import check_model_folder, quiet_transformers, weights_fingerprint
from trimtab.models.reward import HEAD
from trimtab.rewards.build import build_reward, check_columns, check_reward, reward_fingerprints
from trimtab.rewards.models import ModelReward
from trimtab.rewards.requests import PromptBatch
from trimtab.rewards.types import RewardFailed, RewardRequest, WeightedReward
from trimtab.rollout.engine import Engine
from trimtab.rollout.factory import build_engine, build_vllm_engine
from trimtab.rollout.sampling import SamplingParams, request_seed, stop_tokens
from trimtab.rollout.trajectory import Trajectory

SCORED_AT_ONCE = 64  # answers; what is not scored yet is lost when the process dies

REWARD_CONTENTS = "content of the reward"  # among the settings of the work

OF_EPISODES = ["agent_func_path", "environment", "max_turns", "episode_max_len", "observation_max_len", "agent_history"]
Group = list[Trajectory]  # the answers to one prompt


def generate(options: GenerateOptions) -> None:
    device = find_device()
    try:
        world = find_world(device)
        with StopRequest(at_once=True) as stop, share_signals(stop, world):
            Generation(options, device, world, stop).run()
    finally:
        leave_world()


def rehearse_generation(options: GenerateOptions) -> list[str]:
    """What can be said without the model's weights."""
    tokenizer = load_job_tokenizer(options)
    options = in_template_of(tokenizer, options)
    store, report = load_prompts(options, tokenizer)
    check_columns({"prompt": store}, options)
    rows = prompts_of_iteration(store, options)
    prompts = len(rows)
    tried = check_reward(options, find_device(), tokenizer, store) if is_scored(options) else []
    if options.plays:
        from trimtab.server.environment_factory import check_environment

        first = PromptBatch.of(store, [(rows[0], request_seed(options.seed, rows[0]))], rewarded=True)
        plain = not options.apply_chat_template
        tried += check_environment(options, first.tasks()[0], first.ids[0], tokenizer, plain=plain)
    return [*report.lines(), f"{prompts:,} prompts, {prompts * options.best_of_n:,} answers", *tried]


def is_scored(options: GenerateOptions) -> bool:
    return options.plays or bool(options.named_rewards)


class Generation:
    def __init__(self, options: GenerateOptions, device: Device, world: World, stop: StopRequest):
        self.tokenizer = load_job_tokenizer(options)
        options = in_template_of(self.tokenizer, options)
        self.options, self.world, self.stop = options, world, stop
        self.store = self._prompts()
        check_columns({"prompt": self.store}, options)
        self.rows = prompts_of_iteration(self.store, options)
        seed_everything(options.seed, deterministic=options.full_determinism)
        self.policy, self.weights, self.engine = self._engine(device)
        self.player = self._player()
        self.failures: list[str] = []
        self._failed_rewards = 0
        self.limits = [self._room(len(self.store.ids(row))) for row in self.rows]
        self.sampling = sampling_of(
            options,
            n=options.best_of_n,
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=stop_tokens(self.policy, self.tokenizer),
        )
        self.reward = self._reward(device)
        self._tokens, self._began = 0, time.monotonic()
        self._rewards: list[float] = []

    def run(self) -> None:
        """Answer what is not answered yet, and write the rows of all."""
        journal = Journal(self.options.output_path, self._settings(), correctable=(REWARD_CONTENTS,))
        try:
            work_through(len(self.rows), journal, self.world, self.answers, self.figures, "prompts", self.stop)
        finally:
            if self.reward is not None:
                self.reward.close()
            if self.player is not None:
                self.player.close()
            self.engine.close()
        if self.world.is_rank_zero:
            rows = [row for item in range(len(self.rows)) for row in self._output(item, journal.done[item])]
            cut = sum(answer["finish"] == "length" for answers in journal.done.values() for answer in answers)
            if cut:
                print(f"{'note':9}{cut:,} of {len(rows):,} answers were cut at --max_new_tokens or the model's context")
            if failed := [item for item, answers in journal.done.items() if not answers]:
                why = f": {self.failures[0]}" if self.failures else ""
                print(
                    f"{'note':9}{len(failed):,} prompts have no answer, since the environment or a reward failed{why}"
                )
            write_rows(rows, journal, self.options)

    # ---- answers

    def answers(self, items: list[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """(prompt, its answers) as they are finished and scored."""
        groups: dict[int, Group] = {}
        waiting: list[tuple[int, Group]] = []
        requests = [(self.rows[item], request_seed(self.options.seed, self.rows[item])) for item in items]
        questions = PromptBatch.of(self.store, requests, rewarded=self.player is not None)
        for rollout in (self.player or self.engine).stream(
            questions.ids,
            self.sampling,
            seeds=questions.seeds,
            limits=[self.limits[item] for item in items],
            tasks=None if self.player is None else questions.tasks(),
        ):
            self._tokens += len(rollout.ids)
            if is_followed(rollout):
                continue
            group = groups.setdefault(rollout.prompt, [])
            group.append(rollout)
            if len(group) == self.sampling.n:
                item, group = items[rollout.prompt], groups.pop(rollout.prompt)
                if any(answer.finish == "failed" for answer in group):
                    self.failures += [r.episode.problem for r in group if r.episode and r.episode.problem]
                    yield item, []
                    continue
                waiting.append((item, group))
                if self.reward is None or len(waiting) * self.sampling.n >= SCORED_AT_ONCE:
                    yield from self.scored(waiting)
                    waiting = []
        yield from self.scored(waiting)

    def scored(self, waiting: list[tuple[int, Group]]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        if not waiting:
            return
        rollouts = [(item, r) for item, group in waiting for r in sorted(group, key=lambda r: r.sample)]
        texts = self.tokenizer.batch_decode([r.ids for _, r in rollouts], skip_special_tokens=True)
        answers = [{"output": text, "finish": r.finish, **_played(r)} for text, (_, r) in zip(texts, rollouts)]
        failed: dict[int, str] = {}
        if self.reward is not None:
            result = self.reward(self._request(rollouts, texts))
            failed = {place // self.sampling.n: why for place, why in result.failed.items()}
            self._left_out(list(failed.values()))
            self._rewards += [reward for reward in result.rewards if not math.isnan(reward)]
            for answer, reward in zip(answers, result.rewards):
                answer["reward"] = reward
        for place, (item, _) in enumerate(waiting):
            own = answers[place * self.sampling.n : (place + 1) * self.sampling.n]
            yield item, [] if place in failed else own

    def _left_out(self, failed: list[str]) -> None:
        """Prompts without answers because a reward failed; too many of them end the run."""
        self.failures += failed
        self._failed_rewards += len(failed)
        share, all_prompts = self.options.failed_reward_share, len(self.rows)
        if failed and self._failed_rewards > max(share * all_prompts, float(share > 0)):
            raise RewardFailed(
                f"a reward failed for {self._failed_rewards} of {all_prompts} prompts, more than the share of "
                f"{share:g} that may be left out (--max_failed_rewards); the last: {failed[-1]}"
            )

    def figures(self) -> dict[str, str]:
        """What is shown beside the bar."""
        figures = {"tokens/s": f"{self._tokens / (time.monotonic() - self._began):,.0f}"}
        if self._rewards:
            figures["reward"] = f"{sum(self._rewards) / len(self._rewards):.4f}"
        return figures

    # ---- parts

    def _prompts(self) -> PromptDataset:
        if not self.world.is_rank_zero:
            self.world.wait()  # the first process fills the token cache for all
        store, report = load_prompts(self.options, self.tokenizer)
        if self.world.is_rank_zero:
            self.world.wait()
        for line in report.lines():
            self.world.say(line)
        return store

    def _engine(self, device: Device) -> tuple[Policy, str, Engine]:
        """The model (beside vLLM without weights), what tells its weights from others, and what answers with it."""
        options, tokenizer = self.options, self.tokenizer
        if options.rollout_engine == "vllm":
            engine = build_vllm_engine(
                options.pretrain,
                tokenizer,
                bf16=options.bf16,
                max_num_seqs=options.max_num_seqs,
                prefix_caching=options.enable_prefix_caching or options.best_of_n > 1,
                eager=not device.is_accelerator,
                tensor_parallel=options.tp_size or 1,
                seed=options.seed,
                trust_remote_code=options.trust_remote_code,
            )
            policy, weights = fake_policy_with_fingerprint(options.pretrain)
            return policy, f"{weights} by vLLM", engine
        loaded = load_frozen_policy(options.pretrain, options, device, flag="--pretrain")
        return loaded.model, loaded.weights, build_engine(loaded.model, tokenizer, max_num_seqs=options.max_num_seqs)

    def _player(self) -> Engine | None:
        """An engine of episodes around this one, if there is an environment."""
        if not self.options.plays:
            return None
        from trimtab.server.environment_factory import episode_settings, make_environment_engine, open_pool

        pool = open_pool(self.options, self.stop.requested)
        settings = episode_settings(self.options, plain=not self.options.apply_chat_template)
        return make_environment_engine(self.engine, pool, self.tokenizer, settings)

    def _room(self, tokens: int) -> int:
        """New tokens that may follow a prompt of this many."""
        context = self.engine.context
        if context is None:
            return self.options.max_new_tokens
        room = min(self.options.max_new_tokens, context - tokens)
        if room < 1:
            raise UserError(
                f"a prompt of {tokens} tokens fills the model's context of {context}: leave such prompts out with "
                f"--prompt_max_len {context - self.options.max_new_tokens}"
            )
        return room

    def _reward(self, device: Device) -> WeightedReward | None:
        if not is_scored(self.options):
            return None
        return build_reward(self.options, device, self.tokenizer, self.stop.requested)

    def _request(self, rollouts: list[tuple[int, Trajectory]], texts: list[str]) -> RewardRequest:
        rows = [self.rows[item] for item, _ in rollouts]
        prompts, given = [self.store.text(row) for row in rows], [self.store.prompt(row) for row in rows]
        conversations = [prompt for prompt in given if isinstance(prompt, list)]
        # A reward model with another chat template renders the conversation anew.
        columns = [{**self.store.columns(row), self.options.input_key: self._input(row)} for row in rows]
        names = dict.fromkeys(name for row in columns for name in row)
        return RewardRequest(
            queries=[prompt + text for prompt, text in zip(prompts, texts)],
            prompts=prompts,
            responses=texts,
            labels=[self.store.label(row) for row in rows],
            columns={name: [row.get(name) for row in columns] for name in names},
            prompt_ids=[r.prompt_ids for _, r in rollouts],
            response_ids=[r.ids for _, r in rollouts],
            conversations=conversations if len(conversations) == len(given) else [],
            episodes=[r.episode for _, r in rollouts if r.episode is not None],
        )

    def _input(self, row: int) -> str | list[Message]:
        """The prompt as trainers take it: a conversation, which they render, or the text that was read; without the
        wish for a reward, which is not the question."""
        return trainable(self.store.prompt(row), self.options)

    def _output(self, item: int, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        prompt = self._input(self.rows[item])
        return [{"input": prompt} | {k: v for k, v in answer.items() if k != "finish"} for answer in answers]

    def _settings(self) -> dict[str, Any]:
        """What the answers depend on."""
        options = self.options
        names = ["reward_pretrain", "reward_func", "remote_rm_url", "reward_verifier", "reward_weights", "label_key"]
        names += ["judge", "judge_model", "judge_pattern", "judge_range", "judge_params"] if options.judge else []
        names += OF_EPISODES if options.plays else []
        return {
            "model": self.weights,
            "precision": "bf16" if options.bf16 else "fp32",
            "data": self.store.fingerprint,
            "rows": [self.rows.start, self.rows.stop],
            "seed": options.seed,
            "sampling": dataclasses.asdict(self.sampling),
            "reward": [shown(options, name) for name in names],
            REWARD_CONTENTS: None if self.reward is None else reward_fingerprints(self.reward),
        }


def load_job_tokenizer(options: GenerateOptions | ChatOptions | PlayOptions) -> Any:
    quiet_transformers()
    check_model_folder(options.pretrain)
    return load_tokenizer(
        options.pretrain, disable_fast=options.disable_fast_tokenizer, chat_template=options.tokenizer_chat_template
    )


def load_prompts(options: GenerateOptions, tokenizer: Any) -> tuple[PromptDataset, PromptReport]:
    if options.dataset is None:
        from trimtab.server.environment_factory import environment_columns, environment_rows

        count = min(options.env_rows, options.max_samples)
        own = environment_rows(options, count, options.seed, instead="--dataset")["train"]
        return build_prompt_dataset(
            own, tokenizer, dataclasses.replace(options, **environment_columns(own)), what="prompt"
        )
    rows = load_rows(
        options.dataset,
        probabilities=options.dataset_probs,
        split=options.dataset_split,
        max_samples=options.max_samples,
        seed=options.seed,
    )
    return build_prompt_dataset(rows, tokenizer, options, what="prompt")


def in_template_of(tokenizer: Any, options: GenerateOptions) -> GenerateOptions:
    """Where an environment is played, prompts are in the chat template, if there is one, unless somebody says
    otherwise."""
    if not options.plays or "apply_chat_template" in options.given:
        return options
    chat = tokenizer.chat_template is not None and options.input_template is None
    return dataclasses.replace(options, apply_chat_template=chat)


def is_followed(rollout: Trajectory) -> bool:
    """Whether another sequence of the same episode comes, which goes on after it."""
    branches = 1 if rollout.episode is None else int(rollout.episode.logs.get("branches", 1))
    return rollout.branch < branches - 1


def _played(rollout: Trajectory) -> dict[str, Any]:
    """Who said what, of an episode."""
    if rollout.episode is None:
        return {}
    messages = [message for said in rollout.episode.said for message in said.messages]
    return {"messages": [*(rollout.episode.opening or []), *messages]}


def prompts_of_iteration(store: PromptDataset, options: GenerateOptions) -> range:
    """All prompts, or those of --iter."""
    if options.iter is None:
        return range(len(store))
    start = options.iter * options.rollout_batch_size
    if start >= len(store):
        raise UserError(
            f"--iter {options.iter} begins at prompt {start:,}, but there are {len(store):,}: lower it, or "
            f"--rollout_batch_size {options.rollout_batch_size}"
        )
    return range(start, min(start + options.rollout_batch_size, len(store)))


def sampling_of(options: GenerateOptions | ChatOptions | PlayOptions, **others: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if options.greedy_sampling else options.temperature,
        top_p=1.0 if options.greedy_sampling else options.top_p,
        repetition_penalty=options.repetition_penalty,
        **others,
    )


def trainable(prompt: str | list[Message], options: GenerateOptions) -> str | list[Message]:
    """A row's prompt as a trainer takes it that is given no template."""
    if isinstance(prompt, str) and not options.apply_chat_template:
        return in_template(prompt, options.input_template)
    return as_messages(prompt, "user")


# ---- `trimtab generate --eval_task rm`: the reward of every answer in the data, by a reward model
#
# Prompt and answer are rendered, tokenised and cut as in the training of reward models, so an answer has here the
# score that it has there.


ROWS_SCORED_AT_ONCE = 256  # rows; within them passes are made of rows of like length


def score(options: GenerateOptions) -> None:
    device = find_device()
    try:
        world = find_world(device)
        with StopRequest(at_once=True) as stop, share_signals(stop, world):
            Scoring(options, device, world, stop).run()
    finally:
        leave_world()


def rehearse_scoring(options: GenerateOptions) -> list[str]:
    """What can be said without the model's weights."""
    load_job_tokenizer(options)
    rows = AnswerRows(options)
    rows.record(0)
    return [f"{len(rows):,} answers ({rows.columns.description})"]


class AnswerRows:
    """The rows to score."""

    def __init__(self, options: GenerateOptions):
        self.rows: Dataset = load_rows(
            options.dataset,
            probabilities=options.dataset_probs,
            split=options.dataset_split,
            max_samples=options.max_samples,
            seed=options.seed,
        )
        self.places = locations_of(self.rows, "the answers")
        self.columns = find_supervised_columns(
            self.rows.column_names, settings_of(SupervisedKeys, options), self.rows[0]
        )

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, row: int) -> SupervisedRecord:
        """A prompt and its answer, which may have been a conversation's last turn."""
        record = located(partial(read_supervised, self.rows[row], self.columns), row, self.places)
        if record.response is not None:
            return record
        return SupervisedRecord(record.prompt[:-1], record.prompt[-1:], record.tools)


class Scoring:
    def __init__(self, options: GenerateOptions, device: Device, world: World, stop: StopRequest):
        self.options, self.world, self.stop = options, world, stop
        tokenizer = load_job_tokenizer(options)
        self.rows = AnswerRows(options)
        world.say(f"answers: {len(self.rows):,} ({self.rows.columns.description})")
        seed_everything(options.seed, deterministic=options.full_determinism)
        self.model = ModelReward(
            options.pretrain,
            options,
            device,
            max_len=options.max_len,
            max_samples=options.micro_batch_size,
            flag="--pretrain",
        )
        if not hasattr(self.model.inner, HEAD):
            raise UserError(
                f"--pretrain {options.pretrain}: {type(self.model.inner).__name__} is not a decoder; score with it "
                "while generating, as --reward_pretrain"
            )
        self.tokenizer = tokenizer
        self.renderer = AnswerRenderer(
            self.rows.columns.names,
            tokenizer,
            "answers",
            as_chat=options.apply_chat_template,
            input_template=options.input_template,
        )
        self._sum, self._count, self._cut = 0.0, 0, 0

    def run(self) -> None:
        """Score what is not scored yet, and write the rows of all."""
        journal = Journal(self.options.output_path, self._settings())
        work_through(len(self.rows), journal, self.world, self.scores, self.figures, "answers", self.stop)
        if self.world.is_rank_zero:
            if self._cut:
                print(f"{'note':9}{self._cut:,} answers were judged by their first {self.options.max_len:,} tokens")
            write_rows([self._output(row, journal.done[row]) for row in range(len(self.rows))], journal, self.options)

    def scores(self, items: list[int]) -> Iterator[tuple[int, float]]:
        for start in range(0, len(items), ROWS_SCORED_AT_ONCE):
            some = items[start : start + ROWS_SCORED_AT_ONCE]
            sequences = self.sequences(some)
            self._cut += sum(len(ids) > self.options.max_len for ids in sequences)
            rewards = self.model.scores(sequences)
            self._sum, self._count = self._sum + sum(rewards), self._count + len(rewards)
            yield from zip(some, rewards)

    def sequences(self, items: list[int]) -> list[np.ndarray]:
        """What the model reads of these rows: up to the end of the answer."""
        renderings = []
        for item in items:
            record = self.rows.record(item)
            render = partial(self.renderer.render_answer, record.prompt, record.response, record.tools)
            renderings.append(located(render, item, self.rows.places))
        return [up_to_answer(*tokens)[0] for tokens in tokenize_renderings(renderings, self.tokenizer)]

    def figures(self) -> dict[str, str]:
        """What is shown beside the bar."""
        return {"reward": f"{self._sum / self._count:.4f}"} if self._count else {}

    def _output(self, row: int, reward: float) -> dict[str, Any]:
        record = self.rows.record(row)
        answer = record.response
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]["content"]
        return {"input": trainable(record.prompt, self.options), "output": answer, "reward": reward}

    def _settings(self) -> dict[str, Any]:
        """What the rewards depend on."""
        options = self.options
        return {
            "model": weights_fingerprint(self.model.model),
            "precision": "bf16" if options.bf16 else "fp32",
            "data": rows_hash(self.rows.rows),
            "choice of columns": asdict(self.rows.columns),
            "template": [options.input_template, options.apply_chat_template, self.tokenizer.chat_template],
            "max_len": options.max_len,
        }
