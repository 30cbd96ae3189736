"""The files of an RL run: description, metrics, a few answers of every iteration, checkpoints and models.

save_path/    the policy as a Hugging Face folder, options.yaml, manifest.json, metrics.jsonl, rollouts.jsonl,
              tokens.jsonl, critic/ with --save_value_network, ledger.jsonl with --async_train
ckpt_path/    global_stepN/ with actor/, critic/ or proposal/, experience/ if the run was stopped inside an iteration,
              ahead/ with the untrained groups of an asynchronous run, and difficulty/ with pass rates by prompt
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.config.rl_jobs import RLOptions
from trimtab.data.prompts import PromptDataset
from trimtab.distributed.launcher import Group
from trimtab.distributed.mesh import Mesh
from trimtab.errors import CannotWrite, RunFailed, UserError
from trimtab.files import writing
from trimtab.rewards.types import RewardFailed
from trimtab.train.alarms import not_finite_line, resume_line
from trimtab.train.checkpoint import Checkpoints, ShardedTensors, reading_checkpoint, write_sharded
from trimtab.train.metrics import MetricsFile, RunLog
from trimtab.train.rl.async_client import RolloutStalled
from trimtab.train.rl.experience import FINISHES, Experience, is_earlier
from trimtab.train.rl.rollout_client import EnvironmentFailed
from trimtab.train.rl.rollout_files import (
    TimeLine,
    TokenTexts,
    best_and_worst,
    sample_fields,
    token_fields,
    turns,
    whole_groups,
)
from trimtab.train.run_directory import RunDirectory, SpaceWatch, compare_manifests
from trimtab.train.update import InsufficientMemory

LEARNERS = ("actor", "critic", "proposal")
LOOP_FOLDERS = ("experience", "ahead", "difficulty")
SHOWN_CHARACTERS = 4000  # of a prompt or an answer in rollouts.jsonl


@dataclass
class Checkpoint:
    """The state from which a run resumes."""

    iteration: int
    roles: Any
    tensors: dict[str, dict[str, Tensor]]  # the loop's tensors besides models, by folder
    state: dict[str, Any]  # the loop's state besides tensors


class RunFiles:
    """Reads and writes all files of an RL run."""

    def __init__(
        self,
        options: RLOptions,
        manifest: dict,
        tokenizer: Any,
        total: int,
        stores: dict[str, PromptDataset] | None = None,
    ):
        """`stores`: the prompts by name, for their labels."""
        self.options, self.manifest, self.tokenizer = options, manifest, tokenizer
        self.stores = stores or {}
        self.total = total
        self.folder = Path(options.save_path)
        self.run_directory = RunDirectory(options, manifest)
        self.checkpoints = Checkpoints(
            Path(options.checkpoint_folder), keep=options.max_ckpt_num, keep_gib=options.max_ckpt_mem, run=self.folder
        )
        self._log: RunLog | None = None
        self._ledger: MetricsFile | None = None
        self._answers = 0  # index of the last saved answer of the iteration
        self._texts = TokenTexts(tokenizer)
        self.time_line = TimeLine()

    # ---- logs

    def open(self, start: int, roles: Any, *, resumed: bool) -> None:
        self.run_directory.describe()
        resume_from = start if resumed else None
        with writing(f"--save_path {self.folder}: cannot write there"):
            self._rollouts = MetricsFile(self.folder / "rollouts.jsonl", resume_from=resume_from)
            self._tokens = MetricsFile(self.folder / "tokens.jsonl", resume_from=resume_from)
            if self.options.outlives_updates:
                self._ledger = MetricsFile(self.folder / "ledger.jsonl", resume_from=resume_from, key="iteration")
        if self.options.outlives_updates:
            self.time_line = TimeLine(self.folder, resume_from=resume_from)
        self._log = RunLog(
            self.options,
            self.manifest,
            self.folder,
            verb=self.options.verb,
            total=self.total,
            start=start,
            resumed=resumed,
            shown=shown,
            space=self._space(roles),
        )

    def _space(self, roles: Any) -> SpaceWatch:
        options = self.options
        sizes = {name: role.call("trained_parameters")[0] for name, role in learning_roles(roles).items()}
        written = sum(size for name, size in sizes.items() if name != "critic" or options.save_value_network)
        averaged = sizes["actor"] if options.enable_ema else 0
        checkpoint = sum(role.call("state_bytes")[0] for role in learning_roles(roles).values()) + 4 * averaged
        return SpaceWatch(options, model=written * (2 if options.bf16 else 4), checkpoint=checkpoint)

    def write(self, row: dict) -> None:
        assert self._log is not None
        self._log.write(row)

    def keep_samples(self, iteration: int, experience: Experience) -> None:
        """Save the best and worst answers of an iteration and a few whole groups, to show what is rewarded."""
        if not self.options.save_rollouts:
            return
        extremes = best_and_worst(experience, self.options.save_rollouts)
        grouped = whole_groups(experience, iteration, self.total)
        chosen = dict.fromkeys([*extremes, *grouped])
        self._keep(iteration, experience, chosen, "train", extremes, set(grouped))

    def keep_evaluation(self, iteration: int, experience: Experience) -> None:
        """Save the answers to the first prompts of the evaluation, the same prompts every time."""
        if self.options.save_rollouts:
            everything = experience.lasts_E.tolist()
            self._keep(iteration, experience, everything, "evaluation", {}, set(everything))

    def _keep(
        self,
        iteration: int,
        experience: Experience,
        chosen: Iterable[int],
        store: str,
        extremes: dict[int, str],
        grouped: set[int],
    ) -> None:
        kept: list[dict[str, Any]] = []
        with writing(f"--save_path {self.folder}: cannot write there"):
            for i in chosen:
                prompt, response, row = experience.prompt(i), experience.response(i), int(experience.rows_S[i])
                label = self.stores[store].label(row) if store in self.stores else None
                self._answers = self._answers + 1 if iteration == self._rollouts.last else 0
                fields = token_fields(experience, i, self._texts)
                self._tokens.write({"step": iteration, "answer": self._answers, **fields})
                kept.append(
                    {
                        "step": iteration,
                        "answer": self._answers,
                        "row": row,
                        "prompt": self.tokenizer.decode(prompt)[-SHOWN_CHARACTERS:],
                        "response": self.tokenizer.decode(response)[:SHOWN_CHARACTERS],
                        **({} if label is None else {"label": str(label)[:SHOWN_CHARACTERS]}),
                        **sample_fields(experience, i),
                        "tokens": int(experience.lengths_S[i]),
                        "finish": FINISHES[experience.finishes_S[i]],
                        **self._episode_fields(experience, i),
                        "kept": extremes.get(i),
                        "group": store if i in grouped else None,
                    }
                )
                self._rollouts.write(kept[-1])
        if self._log is not None:
            self._log.show(kept)

    @staticmethod
    def _episode_fields(experience: Experience, i: int) -> dict[str, Any]:
        if experience.episodes is None:
            return {}
        episode = experience.episodes[i]
        return {
            "turns": turns(episode, SHOWN_CHARACTERS),
            "environment": {"reward": episode.reward, "begun": episode.begun, **episode.logs},
        }

    def keep_places(self, iteration: int, settled: dict[str, list[int]] | None) -> None:
        """Append to ledger.jsonl the places that an iteration has trained, and those filtered before it."""
        if self._ledger is not None and settled is not None and iteration > self._ledger.last:
            with writing(f"--save_path {self.folder}: cannot write there"):
                self._ledger.write({"iteration": iteration, **settled})

    def clock(self, seconds: dict[str, float], tokens: int, passes: int, memory_gib: float) -> dict[str, float]:
        """Timing and memory columns, which may differ between two equal runs."""
        whole = sum(seconds.values())
        return {
            "seconds": whole,
            **{f"seconds_{phase}": spent for phase, spent in seconds.items()},
            "tokens_per_second": tokens / whole,
            "rollout_tokens_per_second": tokens / seconds["rollout"],
            "update_tokens_per_second": tokens * passes / seconds["update"],
            "memory_gib": memory_gib,
        }

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._rollouts.close()
            self._tokens.close()
            self.time_line.close()
            if self._ledger is not None:
                self._ledger.close()

    # ---- checkpoints

    @contextmanager
    def saving_on_failure(self, checkpoint: Callable[[], Checkpoint]) -> Iterator[None]:
        """On failure of a reward, an environment, memory or a disk, save a checkpoint and name it in the error."""
        try:
            yield
        except CannotWrite as error:
            raise UserError(f"{error}; {self.rescue(checkpoint())}") from error
        except (RewardFailed, EnvironmentFailed, InsufficientMemory, RolloutStalled) as error:
            try:
                # After out-of-memory, sharded weights can be saved as shards, but gathering them might fail again.
                where = resume_line(self.save(checkpoint(), export=not isinstance(error, InsufficientMemory)))
            except CannotWrite:
                where = self.rescue(checkpoint())
            raise RunFailed(f"{error}; {where}") from error
        finally:
            self.close()

    def save(self, checkpoint: Checkpoint, *, export: bool = True) -> Path | None:
        """Save a checkpoint; `export`: with --save_hf_ckpt, export the models too."""
        self.check_finite(checkpoint.roles)
        models = None
        if export and self.options.save_hf_ckpt:
            models = lambda folder: self._export(checkpoint.roles, folder)  # noqa: E731
        if not self.options.disable_ds_ckpt:
            return self.checkpoints.save(checkpoint.iteration, *self._contents(checkpoint), models)
        if models is not None:
            self.checkpoints.export_only(checkpoint.iteration, models)
        return None

    def rescue(self, checkpoint: Checkpoint) -> str:
        """Save the checkpoint on another disk after one failed; returns a message with the place."""
        self.check_finite(checkpoint.roles)
        return self.checkpoints.rescue(checkpoint.iteration, *self._contents(checkpoint))

    def _contents(self, checkpoint: Checkpoint) -> tuple[Callable[[Path], None], dict]:
        """A function that writes the checkpoint's tensors, and its state."""
        step, roles = checkpoint.iteration, checkpoint.roles
        learners = learning_roles(roles)
        random = {
            name: {str(stream): state for stream, state in zip(role.processes.streams, role.call("random_state"))}
            for name, role in _with_random_state(roles).items()
        }

        def write(folder: Path) -> None:
            for name, role in learners.items():
                raise_problem(role.call("write_state", folder=folder / name, step=step))
            for name, held in checkpoint.tensors.items():
                if held:
                    write_sharded(folder / name, held, Mesh(), step)

        return write, {**checkpoint.state, "manifest": self.manifest, "random": random}

    def load(self, roles: Any) -> tuple[dict[str, dict[str, Tensor]], dict] | None:
        """Load the newest checkpoint into the roles, and return the loop's tensors and state; None without one."""
        loaded = self.checkpoints.load()
        if loaded is None:
            print(f"no checkpoint in {self.checkpoints.folder}: starting from the beginning", flush=True)
            return None
        path, state = loaded
        for line in compare_manifests(state["manifest"], self.manifest, path):
            print(f"warning: {line}", flush=True)
        learners = learning_roles(roles)
        if (trained := [name for name in LEARNERS if (path / name).is_dir()]) != list(learners):
            raise UserError(
                f"--ckpt_path {path}: this run trained {' and '.join(trained)}, and now it should be "
                f"{' and '.join(learners)}; give its own settings, or another --ckpt_path"
            )
        with reading_checkpoint(path):
            held = {name: ShardedTensors(path / name) for name in LOOP_FOLDERS if (path / name).is_dir()}
            if "experience" in held and is_earlier(held["experience"].names()):
                raise UserError(
                    f"--ckpt_path {path}: an earlier version of Trimtab was stopped inside an iteration, whose answers "
                    "this one does not read; remove this folder to use the checkpoint before it"
                )
            for name, role in learners.items():
                role.call("read_state", folder=path / name)
            random = state["random"]
            if isinstance(random, list):  # earlier versions kept the states of the last one only
                random = {[*learners][-1]: {str(rank): state for rank, state in enumerate(random)}}
            for name, role in _with_random_state(roles).items():
                states = random.get(name, {})  # a process without this role before keeps its state
                role.each("restore_random_state", [states.get(str(stream)) for stream in role.processes.streams])
            tensors = {where: {name: parts.whole(name) for name in parts.names()} for where, parts in held.items()}
        if not self.options.check_only:
            print(f"resumed from {path} at iteration {state['counters']['iteration']}", flush=True)
        return tensors, state

    # ---- models

    def check_finite(self, roles: Any) -> None:
        """Raise before weights that are not finite overwrite a good model or checkpoint."""
        for name, role in learning_roles(roles).items():
            if not all(role.call("is_finite")):
                raise RunFailed(not_finite_line(f"in the {name}", self.checkpoints.latest()))

    def save_models(self, roles: Any) -> None:
        self.check_finite(roles)
        with writing(f"--save_path {self.folder}: cannot write the model"):
            self._export(roles, self.folder)
        self.run_directory.finish()

    def _export(self, roles: Any, folder: Path) -> None:
        self._save(roles.actor, folder)
        if roles.critic is not None and self.options.save_value_network:
            self._save(roles.critic, folder / "critic")

    def _save(self, role: Group, folder: Path) -> None:
        raise_problem(role.call("save", folder=folder))


def raise_problem(problems: list[str | None]) -> None:
    """Raise OSError if one of a role's processes could not write."""
    if problem := next((found for found in problems if found), None):
        raise OSError(problem)


def learning_roles(roles: Any) -> dict[str, Any]:
    return {name: role for name in LEARNERS if (role := getattr(roles, name, None)) is not None}


def _with_random_state(roles: Any) -> dict[str, Group]:
    """Roles with a random state to save. Engines in their own processes sample by seeds alone, and calling one that
    hangs would block the checkpoint."""
    return {name: role for name, role in vars(roles).items() if role is not None and not role.apart}


def shown(row: dict) -> dict[str, str]:
    """The figures of an iteration for the progress bar."""
    figures = {"reward": ("reward", ".3f"), "kl": ("kl", ".4f"), "length": ("length", ".0f")}
    figures |= {
        "teacher": ("teacher_kl", ".3f"),
        "distance": ("distance", ".3f"),
        "age": ("age", ".1f"),
        "eval": ("eval_pass_1", ".3f"),
        "tok/s": ("tokens_per_second", ",.0f"),
    }
    shown_row = {label: format(row[name], style) for label, (name, style) in figures.items() if name in row}
    if row.get("skipped_steps"):
        shown_row["skipped"] = str(row["skipped_steps"])
    return shown_row
