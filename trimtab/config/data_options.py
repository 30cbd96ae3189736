"""Options of data: sources, rows and columns, chat templates, prompts, and environments.

What can be said of a source before it is read is checked here too.
"""

import gzip
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimtab.config.option import Options, option, required
from trimtab.errors import UserError

DATA_SUFFIXES = {".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt", ".py"}
FILE_TYPES = {"json", "csv", "parquet", "arrow", "text"}
SMALL_FILE = 4096


def check_place(place: str, flag: str) -> list[str]:
    """A local path must be there; a hub name passes, with a warning where it may be a mistyped path."""
    parent, name = os.path.split(os.path.expanduser(place))
    if os.path.exists(os.path.join(parent, name)):
        return []
    if looks_like_a_path(place):
        raise UserError(f"{flag}: {place} does not exist; check the path")
    if os.path.isdir(parent):
        return [f"{flag}: there is no {name} in the folder {parent}, so {place} is taken for a hub name"]
    return []


def looks_like_a_path(text: str) -> bool:
    """A hub name is `name` or `owner/name`, without a data file's suffix."""
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or os.path.splitext(text)[1].lower() in DATA_SUFFIXES


def listed(text: str | None) -> list[str]:
    """What a text that separates by commas lists."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def check_sources(text: str | None, flag: str) -> list[str]:
    """Refuse local sources that do not exist; return warnings about what may be a mistyped one."""
    warnings = []
    for source in listed(text):
        kind, at, folder = source.partition("@")
        if at and kind in FILE_TYPES:
            if not os.path.isdir(os.path.expanduser(folder)):
                raise UserError(f"{flag} {source}: there is no folder {folder}")
            continue
        if not at:
            warnings += check_place(source, flag)
        with suppress(OSError, EOFError):  # what cannot be read is explained where it is read
            refuse_empty(Path(source).expanduser())
    return warnings


def refuse_empty(path: Path) -> None:
    """A data file that holds nothing but white space (looked at only in small files), or a folder without files."""
    if path.is_dir() and not any(path.iterdir()):
        raise no_data_in(path)
    if not path.is_file():
        return
    size = path.stat().st_size
    if size and path.suffix == ".gz":
        with gzip.open(path, "rb") as file:
            empty = not file.read(SMALL_FILE).strip()
    else:
        empty = size < SMALL_FILE and not path.read_bytes().strip()
    if empty:
        raise UserError(f"{path} is empty: it holds no rows")


def no_data_in(folder: Path) -> UserError:
    return UserError(f"no data in {folder}: it holds no json, jsonl, csv, parquet or arrow file")


def check_mixture(sources: str, shares: str | None, flag: str) -> list[str]:
    """The same for sources that training cannot do without, with the share of each (`flag`_probs)."""
    names = listed(sources)
    if not names:
        raise UserError(f"{flag} {sources!r} names no source")
    if shares is not None:
        _check_shares(shares, len(names), flag)
    return check_sources(sources, flag)


def _check_shares(text: str, sources: int, flag: str) -> None:
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"{flag}_probs {text!r} must be numbers separated by commas, for example 0.7,0.3") from None
    if len(shares) != sources:
        raise UserError(f"{flag}_probs has {len(shares)} numbers for {sources} sources in {flag}")
    if not all(share >= 0 for share in shares) or not 0 < sum(shares) < float("inf"):
        raise UserError(f"{flag}_probs {text!r}: no share may be negative, and their sum must be above 0")


# ---- rows, columns, templates


def check_function(place: str, flag: str, otherwise: str) -> None:
    """Refuse what is no FILE.py or FILE.py:NAME, or is not there."""
    file = place[: place.rfind(".py") + 3]  # a function's name may follow
    if not file.endswith(".py"):
        raise UserError(f"{flag} {place} {otherwise} a Python file")
    if not os.path.isfile(os.path.expanduser(file)):
        raise UserError(f"{flag}: {file} does not exist; check the path")


class CountOptions(Options):
    """Data"""

    max_samples: int = option(1_000_000, at_least=1)
    """At most this many rows are used; in training, to train on."""


class RowOptions(CountOptions):
    """Data"""

    eval_dataset: str | None = None
    """Data for evaluation; unset: the training source's test split, if it has one (RL: none)."""
    eval_split: str = option("train", needs="eval_dataset")
    """Split of --eval_dataset."""
    eval_max_samples: int | None = option(None, at_least=1)
    """At most this many rows are used to evaluate with; unset: all."""
    num_workers: int | None = option(None, at_least=1)
    """Processes that tokenise; unset: one per core, at most 8."""

    def check(self) -> Iterable[str]:
        return check_sources(self.eval_dataset, "--eval_dataset")


class LengthOptions(Options):
    """Data"""

    max_len: int = option(2048, at_least=1)
    """At most this many tokens in a sample, prompt and answer together."""


class PromptLengthOptions(Options):
    """Data"""

    prompt_max_len: int = option(1024, at_least=1)
    """At most this many tokens in a prompt; rows with longer ones are left out, and counted."""


class SourceOptions(Options):
    """Data"""

    dataset: str = required("DATA", "a file, a folder or a hub name")
    """Hub names, files (json, jsonl, csv, parquet, arrow, .py) or folders, separated by commas; type@folder for the
    files of one type in a folder."""
    dataset_probs: str | None = None
    """Share of each source, separated by commas; unset: the sources are concatenated."""
    dataset_split: str = "train"
    """Split to use."""

    def check(self) -> Iterable[str]:
        return check_mixture(self.dataset, self.dataset_probs, "--dataset") if self.dataset else ()


class DataOptions(SourceOptions, RowOptions, LengthOptions):
    """Data"""


class ChatTemplateOptions(Options):
    """Conversations"""

    tokenizer_chat_template: str | None = None
    """Jinja chat template, or a file that holds one, to use instead of the tokenizer's own."""


class TemplateOptions(ChatTemplateOptions):
    """Conversations"""

    input_template: str | None = None
    """Text with {} where the prompt goes, used when no chat template is; None switches it off."""
    apply_chat_template: bool = False
    """Render conversations with the tokenizer's chat template; a plain string becomes one user turn."""

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        if self.input_template is None or "{}" in self.input_template:
            return ()
        changes["input_template"] = None
        return ["--input_template has no {} for the prompt, so it is left out"]

    def check(self) -> Iterable[str]:
        if self.apply_chat_template:
            return self.idle(["input_template"], "beside --apply_chat_template")
        if self.input_template and "\\n" in self.input_template:
            return [r"--input_template holds a backslash and an n, not a new line: in bash write $'...\n...'"]
        return ()


class InputColumn(Options):
    """Conversations"""

    input_key: str = "input"
    """Column that holds the prompt, the messages or the text."""


class OutputColumn(Options):
    """Conversations"""

    output_key: str | None = None
    """Column that holds the answer; unset: the answer is the last turn of the input."""


class ConversationOptions(InputColumn, OutputColumn, TemplateOptions):
    """Conversations"""


class LabelColumn(Options):
    """Conversations"""

    label_key: str = "label"
    """Column that holds the judgement: of a whole answer 1 or 0, of an answer in steps a list with one label a
    step."""


class PreferenceColumns(Options):
    """Conversations"""

    prompt_key: str | None = None
    """Column that holds the prompt both answers share; unset: each answer column holds the whole conversation."""
    chosen_key: str = "chosen"
    """Column that holds the preferred answer or conversation."""
    rejected_key: str = "rejected"
    """Column that holds the other one."""


# ---- environments, which answer the policy turn by turn


SOURCES = ("gem", "rg", "verifiers", "trimtab")
"""What an --environment may begin with."""
NEEDED = "without --agent_func_path or --environment"
FROM_DATA = ("prompt_data", "dataset")
"""Options of jobs that an environment's own rows can stand in for."""


class PromptOptions(RowOptions, PromptLengthOptions):
    """Data"""

    prompt_data: str = required("DATA", "a file, a folder or a hub name")
    """Prompts: hub names, files or folders, separated by commas, as --dataset of the other jobs."""
    prompt_data_probs: str | None = None
    """Share of each source, separated by commas; unset: the sources are concatenated."""
    prompt_split: str = "train"
    """Split to train on."""
    truncate_prompts: bool = False
    """Cut prompts longer than --prompt_max_len, whose first tokens stay, instead of leaving them out; they are counted
    too."""
    no_shuffle: bool = False
    """Take the prompts in the order of the data, in every episode."""
    drop_last: bool = False
    """Leave out the prompts at the end of an episode that do not fill an iteration."""
    # Unlike --max_len of the other jobs, which is always a number.
    max_len: int | None = None
    """At most this many tokens in prompt and answer together; unset: prompt_max_len + generate_max_len. Deprecated."""

    def check(self) -> Iterable[str]:
        if self.prompt_data is None:  # an environment has rows
            return self.idle(["prompt_data_probs", "prompt_split"], "without --prompt_data")
        return check_mixture(self.prompt_data, self.prompt_data_probs, "--prompt_data")


class PromptColumns(InputColumn):
    """Conversations"""

    # Unlike --label_key of the other jobs, which judges an answer and is never unset.
    label_key: str | None = None
    """Column that is handed to the reward as the prompt's label, such as the right answer."""


class PretrainMixOptions(Options):
    """Pre-training mix"""

    pretrain_data: str | None = None
    """Text to go on pre-training on beside RL (PTX)."""
    pretrain_data_probs: str | None = option("1.0", needs="pretrain_data")
    """Share of each source of --pretrain_data."""
    pretrain_split: str = option("train", needs="pretrain_data")
    """Split of --pretrain_data."""
    ptx_coef: float = option(0.05, at_least=0, needs="pretrain_data")
    """Weight of the loss on --pretrain_data; an update takes as many of its rows as it has samples."""

    def check(self) -> Iterable[str]:
        return check_sources(self.pretrain_data, "--pretrain_data")


class EnvironmentOptions(Options):
    """Environments"""

    agent_func_path: str | None = None
    """Python file of an environment that answers the policy turn by turn, as FILE.py or FILE.py:NAME; the shapes of
    OpenRLHF, TRL, Gymnasium, GEM and SkyRL are known."""
    environment: str | None = None
    """An environment of a library: gem:NAME, rg:NAME (reasoning-gym), verifiers:MODULE, or trimtab:NAME for an embedded
    one."""
    env_rows: int = option(10_000, at_least=1)
    """Rows that an environment is asked for where no prompts are given; one that has a data set gives at most that."""
    max_turns: int = option(16, at_least=1)
    """Turns of the policy in an episode."""
    episode_max_len: int | None = option(None, at_least=1)
    """Tokens of an episode, from the prompt to its end; unset: the model's context."""
    observation_max_len: int | None = option(None, at_least=1)
    """Tokens of what an environment says at a time; of longer ones the middle is cut out; unset: no limit."""
    agent_history: str = option("append", choices=("append", "template"))
    """append: what was said stays as it was, and only what is new is added. template: the chat template renders the
    conversation anew for every turn; where it leaves out earlier words, an episode falls into several sequences."""
    env_timeout: float = option(60.0, above=0)
    """Seconds that a reset, a step or a tool call may take."""
    env_workers: int | None = option(None, at_least=1)
    """Processes that environments run in; unset: one for each core, and at most 8."""
    env_threads: int = option(16, at_least=1)
    """Threads in each of them for methods that are not async: the number of calls that run at the same time."""
    env_memory: float = option(8.0, above=0)
    """GiB that each of them may take."""
    env_retries: int = option(2, at_least=0)
    """How often an episode is begun anew whose environment raised, hung or died."""

    @property
    def plays(self) -> bool:
        """Whether answers are episodes of an environment."""
        return self.environment_source is not None

    @property
    def environment_source(self) -> str | None:
        return self.agent_func_path or self.environment

    @property
    def environment_flag(self) -> str:
        """The option that names it, as messages begin."""
        return f"--{'agent_func_path' if self.agent_func_path else 'environment'} {self.environment_source}"

    def may_lack(self, name: str) -> bool:
        return (name in FROM_DATA and self.plays) or super().may_lack(name)

    def check(self) -> Iterable[str]:
        if self.agent_func_path and self.environment:
            raise UserError("--agent_func_path and --environment: an episode has one environment; give one of them")
        if self.agent_func_path:
            check_function(self.agent_func_path, "--agent_func_path", "is not")
        if self.environment:
            _check_source(self.environment)
        if not self.plays:
            given = [
                name for name in EnvironmentOptions.__annotations__ if name not in ("agent_func_path", "environment")
            ]
            return self.idle(given, NEEDED)
        if any(getattr(self, name, None) for name in FROM_DATA):
            return self.idle(["env_rows"], "where prompts are given")
        return ()


class AgentTrainingOptions(EnvironmentOptions):
    """Environments"""

    env_max_failed: float = option(0.1, at_least=0, at_most=1)
    """Share of an iteration's groups that may be left out before the run stops, with a checkpoint; of few, one.
    A group is left out where an episode of it fails, retries and all; the next prompt is taken for it."""
    env_eval_rows: int = option(0, at_least=0)
    """Rows of the environment to evaluate on: made with another seed than the training rows or, if the environment has
    a data set, held out of it; 0: none."""
    turn_reward: str = option("sum", choices=("sum", "returns"))
    """sum: the rewards of all turns are the episode's. returns: a turn is judged by what comes from it on, less what
    episodes of its group got as wholes."""
    mask_truncated: bool = False
    """Learn nothing from answers and episodes that were cut off: at a limit of tokens or turns, or by the environment.
    Others are still compared with them."""

    def check(self) -> Iterable[str]:
        if self.plays:
            return ()
        own = [name for name in AgentTrainingOptions.__annotations__ if name != "mask_truncated"]
        return self.idle(own, NEEDED)


class LookingOptions(Options):
    """Episodes"""

    episodes: int = option(1, at_least=1)
    """Episodes to play, one after another."""
    row: int = option(0, at_least=0)
    """Row of the data, or of the environment's own, that the first one is about."""
    by_hand: bool = False
    """Play yourself, with the tokens of --pretrain. Without a model that is always so."""
    tokens: bool = False
    """List every token: its id, whether it was drawn, its log-prob."""


def _check_source(text: str) -> None:
    kind, _, name = text.partition(":")
    if kind not in SOURCES or not name:
        forms = ", ".join(f"{known}:NAME" for known in SOURCES)
        instead = "; a file is given by --agent_func_path" if os.path.exists(text.partition(".py")[0] + ".py") else ""
        raise UserError(f"--environment {text!r} is none that is known: give one of {forms}{instead}")
