"""Rollout sources, which provide the experience of the next iteration.

    SyncSource      sampled on request
    ReplaySource    read from a recording
    AsyncSource     groups generated while the policy trains (async_source.py)

Each returns the experience (None: no useful group was left), the number of prompts used, and figures.

With --difficulty, sources pass over the turns of prompts that `DifficultyPools` has retired.

A recording has one file an iteration, with samples and their rewards. With the same options, a replayed run repeats the
recorded run's updates bit for bit. Every file describes the prompts and group sizes it was sampled from, so that a
mismatch is detected. Recordings made by hand, such as conversations with tools, may leave these out; groups then may
have any size. An asynchronous run is recorded batch by batch as it was trained, and replayed synchronously. Its files
also store the staleness bound and the weighting of stale tokens, which the replay adopts.
"""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trimtab.algos.group_rewards import equal_groups, for_groups, within
from trimtab.config.objective_options import ESTIMATORS
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.batches import SampleOrder
from trimtab.data.prompts import PromptDataset
from trimtab.errors import UserError
from trimtab.files import replacing, writing
from trimtab.interrupts import StopRequest
from trimtab.rewards.types import RewardFailed
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.train.rl.experience import Experience, is_earlier
from trimtab.train.rl.rollout_client import EnvironmentFailed, Failures, RolloutClient
from trimtab.train.rl.rollout_files import ReportedSpan

# Settings that an asynchronous run fixes for all tokens.
ASYNC_SETTINGS = ("async_staleness", "mismatch_correction", "mismatch_range")
# Experience (None: no useful group was left), number of prompts used, figures.
Sampled = tuple[Experience | None, int, dict[str, float]]


def with_recorded_options(options: RLOptions) -> RLOptions:
    """The options of a replay, with the recorded asynchronous settings and experts where the user says nothing else.
    Called in every process before they communicate."""
    if not options.replay:
        return options
    changes: dict[str, Any] = {}
    try:
        with Recording(Path(options.replay), {}, None).opened(0) as (file, described):
            yields = "on" in (options.compile, options.exact)
            if options.routing_replay == "auto" and "routes_TLK" in file.keys() and not yields:  # noqa: SIM118
                changes["routing_replay"] = "on"
            if (async_settings := described.get("outliving")) is not None:
                changes |= {name: async_settings[name] for name in ASYNC_SETTINGS}
                changes["mismatch_range"] = tuple(changes["mismatch_range"])
    except UserError:
        return options  # rank 0 reads the whole recording later and reports the problem
    own = {"mismatch_range"} & options.given
    if {"mismatch_correction", "enable_vllm_is_correction"} & options.given:
        own = {"mismatch_correction", "mismatch_range"}
    return dataclasses.replace(options, **{name: value for name, value in changes.items() if name not in own})


class Recording:
    """A folder with the samples and rewards of every iteration, to write or to replay."""

    def __init__(self, folder: Path, cut: dict[str, int], data: str | None):
        """`cut`: the options that set the number of samples of an iteration; `data`: the prompts' fingerprint. Missing
        entries and None are unknown and match anything."""
        self.folder, self.cut, self.data = folder, cut, data
        self.compared = False  # whether the estimator compares the answers of a group
        self.rows: int | None = None  # number of prompts, if known
        self.sampler: dict[str, Any] = {}  # device and dtype, which decide how sampled log-probs are rounded
        self.sampled_alike = True  # whether the last iteration read has log-probs rounded as in this run
        self.async_settings: dict[str, Any] | None = None  # ASYNC_SETTINGS of an asynchronous run

    @classmethod
    def of(cls, options: RLOptions, prompts: PromptDataset | None = None) -> "Recording | None":
        """The recording that a run writes or replays, if any."""
        folder = options.record or options.replay
        if not folder:
            return None
        cut = {"n_samples_per_prompt": options.n_samples_per_prompt, "rollout_batch_size": options.rollout_batch_size}
        recording = cls(Path(folder), cut, None if prompts is None else prompts.fingerprint)
        recording.compared = ESTIMATORS[options.advantage_estimator].grouped
        recording.rows = None if prompts is None else len(prompts)
        if options.outlives_updates:
            recording.async_settings = {name: getattr(options, name) for name in ASYNC_SETTINGS}
        return recording

    # ---- before the run

    def check_empty(self) -> None:
        """Refuse to write into a folder with another run's recording."""
        if any(self._paths()):
            raise UserError(
                f"--record {self.folder}: it holds a recording already; give another folder, or --load_checkpoint to "
                "go on with that run"
            )

    def check_holds(self, prompts: int, iterations: int) -> None:
        """Refuse a recording that is damaged, does not match, or has too few prompts for a run of at most `iterations`;
        tensors are not read."""
        iteration = 0
        while prompts > 0 and iteration < iterations:
            with self.opened(iteration) as (_, described):
                prompts -= described["prompts"]
                async_settings = described.get("outliving")
                if iteration and _correction(async_settings) != _correction(self.async_settings):
                    raise UserError(
                        f"--replay {self._path(iteration)}: it was recorded with other settings of --async_train or "
                        "--mismatch_correction than those before it; record a run that was not changed on its way"
                    )
                self.async_settings = async_settings
            iteration += 1

    def async_line(self, options: RLOptions) -> str | None:
        """A line for the log if the recording (checked before) is of an asynchronous run."""
        if self.async_settings is None:
            return None
        kind, (low, high) = options.mismatch_correction, options.mismatch_range
        weighed = "alike" if kind is None else f"by --mismatch_correction {kind} --mismatch_range {low:g} {high:g}"
        return f"--replay {self.folder}: of an asynchronous run; its tokens are weighed {weighed}"

    # ---- in the run

    def write(self, iteration: int, sampled: Sampled) -> None:
        experience, prompts, figures = sampled
        path = self._path(iteration)
        for later in [found for found in self._paths() if found.name > path.name]:
            later.unlink()  # written before the run resumed from an earlier checkpoint
        described = {"cut": self.cut, "data": self.data, "prompts": prompts, "figures": figures}
        described |= {"sampler": self.sampler} | (
            {} if self.async_settings is None else {"outliving": self.async_settings}
        )
        tensors = {} if experience is None else experience.tensors()
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"iteration": json.dumps(described)})

    def read(self, iteration: int) -> Sampled:
        with self.opened(iteration) as (file, described):
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            experience = Experience.from_tensors(tensors) if tensors else None
            if experience is not None:
                self._check_groups(experience, self._path(iteration))
            # Recordings made by hand have no sampler: their log-probs are used as they are.
            self.sampled_alike = described.get("sampler", self.sampler) == self.sampler
            return experience, described["prompts"], described["figures"]

    def _check_groups(self, experience: Experience, path: Path) -> None:
        """Refuse groups that only a recording made by hand can have."""
        most = self.cut.get("rollout_batch_size", experience.groups)
        if experience.groups > most:
            raise UserError(f"--replay {path}: it has {experience.groups} groups; --rollout_batch_size allows {most}")
        if self.rows is not None and (last := int(experience.rows_S.max())) >= self.rows:
            raise UserError(
                f"--replay {path}: it speaks of row {last + 1} of the prompts, of which there are {self.rows}"
            )
        if self.compared and bool((experience.answers_G < 2).any()):
            raise UserError(
                f"--replay {path}: a group has a single answer, and --advantage_estimator compares the answers of a "
                "group; leave such groups out"
            )

    @contextmanager
    def opened(self, iteration: int) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Open the file of an iteration; yields the file and its metadata."""
        path = self._path(iteration)
        if not path.is_file():
            raise UserError(
                f"--replay {self.folder}: the recording has no iteration {iteration + 1} ({path.name}), and this run "
                "needs it; give the --record folder of a run that was as long"
            )
        try:
            with safe_open(path, framework="pt") as file:
                described = json.loads(file.metadata()["iteration"])
                self._compare(described)
                if is_earlier(file.keys()):
                    raise UserError(f"--replay {path}: an earlier version of Trimtab recorded it; record again")
                yield file, described
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"--replay {path}: it is damaged, or of another kind; record again") from error

    def _compare(self, described: dict[str, Any]) -> None:
        for name, value in self.cut.items():
            if described["cut"].get(name) not in (None, value):
                raise UserError(
                    f"--replay {self.folder}: it was recorded with --{name} {described['cut'][name]}, not {value}; "
                    "give the same"
                )
        if None not in (self.data, described["data"]) and self.data != described["data"]:
            raise UserError(
                f"--replay {self.folder}: it was recorded with other prompts; give the same --prompt_data and "
                "--max_samples"
            )

    def _paths(self) -> Iterator[Path]:
        return self.folder.glob("iteration*.safetensors")

    def _path(self, iteration: int) -> Path:
        return self.folder / f"iteration{iteration + 1:06d}.safetensors"


def _correction(async_settings: dict[str, Any] | None) -> tuple | None:
    """The settings that must not change within a recording; the staleness bound may change on resume."""
    return None if async_settings is None else (async_settings["mismatch_correction"], async_settings["mismatch_range"])


class DifficultyPools:
    """Pass rates by prompt, and which prompts are retired because they are always (easy) or never (hard) solved.

    A turn of a retired prompt is passed over, but for a share --difficulty_return, which the seed and the place decide.
    What the groups of a batch scored counts when the batch is trained, as the prompts do: a batch that is lost on a
    stop is sampled again from the same pools. An asynchronous run keeps its groups, and counts each once it is scored.
    """

    def __init__(self, prompts: int, options: RLOptions):
        self.options = options
        self.rates_R = np.full(prompts, np.nan, np.float32)  # of the last group; NaN: none yet
        self.streaks_R = np.zeros(prompts, np.int32)  # groups in a row: above 0 always solved, below 0 never
        self.pending: list[tuple[int, float]] = []  # rows and pass rates of the batch in hand

    def is_passed_over(self, row: int, place: int) -> bool:
        """Whether the prompt `row` is left out at this place of the order."""
        if abs(self.streaks_R[row]) < self.options.difficulty_after:
            return False
        drawn = request_seed(request_seed(self.options.seed, DIFFICULTY), place) / 2**64 + 0.5
        return drawn >= self.options.difficulty_return

    def add(self, experience: Experience) -> None:
        """Take the pass rates of groups that do not count yet; a group without a sampled token has none."""
        groups_E, drawn_E = experience.groups_E, experience.drawn_E
        solved_E = (experience.scores_S[experience.firsts_E] >= self.options.difficulty_solved) & drawn_E
        solved_G, drawn_G = (
            torch.bincount(groups_E[of_E], minlength=experience.groups) for of_E in (solved_E, drawn_E)
        )
        rows_G = experience.rows_S[experience.firsts_G]
        columns = (column.tolist() for column in (rows_G, solved_G, drawn_G))
        self.pending += [(row, solved / drawn) for row, solved, drawn in zip(*columns) if drawn]

    def commit(self) -> None:
        """Count the pending groups."""
        self.rates_R, self.streaks_R = self._counted()
        self.pending = []

    def _counted(self) -> tuple[np.ndarray, np.ndarray]:
        rates_R, streaks_R = self.rates_R.copy(), self.streaks_R.copy()
        low, high = self.options.difficulty_range
        for row, rate in self.pending:
            before = int(streaks_R[row])
            rates_R[row] = rate
            streaks_R[row] = max(before, 0) + 1 if rate >= high else min(before, 0) - 1 if rate <= low else 0
        return rates_R, streaks_R

    def figures(self, passed_over: int) -> dict[str, float]:
        """Sizes of the pools with the batch in hand, and the turns that were passed over for it."""
        (rates_R, streaks_R), after = self._counted(), self.options.difficulty_after
        easy, hard = float((streaks_R >= after).sum()), float((streaks_R <= -after).sum())
        sizes = {"easy_prompts": easy, "hard_prompts": hard, "active_prompts": len(rates_R) - easy - hard}
        known = rates_R[~np.isnan(rates_R)]
        rate = {"prompt_pass_rate": float(known.mean())} if len(known) else {}
        return sizes | {"passed_over": float(passed_over)} | rate

    def state(self, *, in_hand: bool) -> dict[str, Tensor]:
        """The tensors of a checkpoint; `in_hand`: the loop itself saves the last batch."""
        tensors = {"rates": torch.from_numpy(self.rates_R), "streaks": torch.from_numpy(self.streaks_R)}
        if in_hand and self.pending:
            tensors["pending"] = torch.tensor(self.pending, dtype=torch.float64)
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """`tensors`: none if the run was without --difficulty before."""
        if tensors and len(tensors["rates"]) != len(self.rates_R):
            raise UserError(
                f"--difficulty: the checkpoint has pass rates of {len(tensors['rates'])} prompts, and now there are "
                f"{len(self.rates_R)}; give the --prompt_data and --max_samples of before"
            )
        if tensors:
            self.rates_R, self.streaks_R = tensors["rates"].numpy(), tensors["streaks"].numpy()
            pending = tensors["pending"].tolist() if "pending" in tensors else []
            self.pending = [(int(row), rate) for row, rate in pending]


DIFFICULTY = 0xD1
"""Random stream of returning prompts."""


class RolloutSource(ABC):
    """Provides the experience of the next iteration."""

    recording: Recording | None = None  # if set, every batch is also written to it
    pools: DifficultyPools | None = None

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether the sampled log-probs of the last batch equal those that the trainer would compute."""

    def next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None:
        """The batch of an iteration. None: a stop was requested."""
        sampled = self._next(iteration, prompts_used, stop)
        if self.recording is not None and sampled is not None and not stop.signal:
            with writing(f"--record {self.recording.folder}: cannot write there"):
                self.recording.write(iteration, sampled)
        return sampled

    @abstractmethod
    def _next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None: ...

    # ---- for sources whose groups span updates

    def paused(self) -> AbstractContextManager[None]:
        """A context in which no engine generates, so that weights may change and the engines may be used otherwise."""
        return nullcontext()

    def trained(self) -> None:
        """Called after the last batch was trained."""
        if self.pools is not None:
            self.pools.commit()

    def settled(self) -> dict[str, list[int]] | None:
        """The places of the last batch by outcome, for ledger.jsonl."""
        return None

    def spans(self) -> dict[int, list[ReportedSpan]]:
        """Time spans of each rollout worker since the last call, for time_line.jsonl."""
        return {}

    def rebuilt(self) -> None:  # noqa: B027
        """Called after all rollout workers were rebuilt."""

    def engine_replaced(self) -> None:  # noqa: B027
        """Called after one rollout worker was replaced."""

    def state(self, *, in_hand: bool) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """The untrained groups for a checkpoint, as tensors and JSON. `in_hand`: the loop itself saves the last
        batch."""
        return {}, None

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        if state["ledger"]["versions"]:
            raise UserError(
                f"this run was asynchronous, and {len(state['ledger']['versions'])} groups of its checkpoint are not "
                "trained yet; give --async_train to go on with them"
            )


def prompt_order(prompts: int, options: RLOptions, episodes: int) -> SampleOrder:
    """The order of prompts over all epochs, one per step."""
    multiple = prompts_per_round(options) if options.drop_last else 1
    shuffled = not options.no_shuffle
    return SampleOrder(prompts, 1, episodes, options.seed, shuffled=shuffled, multiple=multiple)


def prompts_per_round(options: RLOptions) -> int:
    """Number of prompts sampled in one round."""
    more = options.vllm_generate_batch_size if options.dynamic_filtering else None
    return more or options.rollout_batch_size


class SyncSource(RolloutSource):
    """Samples the next prompts on request; with dynamic filtering, until enough groups are useful."""

    def __init__(self, options: RLOptions, order: SampleOrder, sampling: SamplingParams, client: RolloutClient):
        """`order`: the prompts over all epochs, one per step."""
        self.options, self.order, self.sampling, self.client = options, order, sampling, client
        self.pools = DifficultyPools(order.samples, options) if options.difficulty else None

    @property
    def exact(self) -> bool:
        return self.client.exact

    def _next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None:
        options, left = self.options, self.order.steps - prompts_used
        wanted = min(options.rollout_batch_size, left)
        most = options.dynamic_filtering_batches or left
        taken, rounds, kept, groups, asked = 0, 0, [], 0, 0
        failures = Failures(options)
        if self.pools is not None:
            self.pools.pending = []  # a batch that was not trained is sampled again
        while groups < wanted and taken < left and rounds < most:
            # Without filtering, further rounds only replace failed groups.
            at_once = prompts_per_round(options) if options.dynamic_filtering else wanted - groups
            requests: list[tuple[int, int]] = []
            while len(requests) < at_once and taken < left:
                place, taken = prompts_used + taken, taken + 1
                row = self.order.step_samples(place)[0]
                if self.pools is None or not self.pools.is_passed_over(row, place):
                    requests.append((row, request_seed(options.seed, place)))
            if not requests:
                break
            sampled = self.client.ask(requests, "train", self.sampling)
            if sampled is None or stop.signal:
                return None
            asked, rounds = asked + len(requests), rounds + 1
            failures.add(sampled.failed)
            part = sampled.experience
            if part is not None and self.pools is not None:
                self.pools.add(part)
            if part is not None and (useful := useful_groups(part, options)):
                kept.append(part if len(useful) == part.groups else part.take(part.samples_of(useful)))
                groups += len(useful)
        filtered = asked - groups - failures.groups
        figures = {"filtered_groups": float(filtered)} if options.dynamic_filtering else {}
        figures |= failures.figures() | ({} if self.pools is None else self.pools.figures(taken - asked))
        if groups < wanted and taken < left:  # --dynamic_filtering_batches has ended the sampling
            if not groups:
                raise RewardFailed(
                    f"no group of answers was of use in {rounds} rounds of sampling (--dynamic_filtering_batches): by "
                    "--dynamic_filtering all of them teach nothing; look at the reward"
                )
        elif not kept or (options.drop_last and groups < options.rollout_batch_size):
            return None, taken, figures
        experience = Experience.joined(kept)
        if experience.groups > wanted:
            experience = experience.take(experience.samples_of(range(wanted)))
        return experience, taken, figures


def useful_groups(experience: Experience, options: RLOptions) -> list[int]:
    """The groups that --dynamic_filtering keeps."""
    if not options.dynamic_filtering:
        return list(range(experience.groups))
    groups_E, scores_E, drawn_E = experience.groups_E, experience.scores_S[experience.firsts_E], experience.drawn_E
    if options.dynamic_filtering_rule == "differing":
        useful_G = ~for_groups(equal_groups, groups_E, scores_E, counted_S=drawn_E, empty=True)
    else:
        low, high = options.dynamic_filtering_reward_range
        useful_G = for_groups(partial(within, low=low, high=high), groups_E, scores_E, counted_S=drawn_E)
    return useful_G.nonzero()[:, 0].tolist()


class ReplaySource(RolloutSource):
    """Reads the batches of a recorded run."""

    def __init__(self, replayed: Recording, client: RolloutClient):
        self.replayed, self.client = replayed, client

    @property
    def exact(self) -> bool:
        return self.client.exact and self.replayed.sampled_alike

    def _next(self, iteration: int, prompts_used: int, stop: StopRequest) -> Sampled | None:
        return self.replayed.read(iteration)


def prepare(experience: Experience, figures: dict[str, float], version: int) -> None:
    """Refuse an experience without sampled tokens. In asynchronous runs, mark the tokens sampled by this version."""
    if not bool(experience.drawn_E.any()):
        raise EnvironmentFailed(
            f"iteration {version + 1}: the model drew no token in any of {len(experience)} samples; look at what ends "
            "them before its first turn (is --episode_max_len long enough for the opening?)"
        )
    if "age" in figures and experience.versions_N is not None:
        experience.fresh_N = (experience.versions_N == version).float()
