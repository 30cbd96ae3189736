"""The metric files of a tail run, under the names and in the layout that RePULSe's own scripts read.

    info_eval_RUN                    rewards, returns, KL a token, -log p: one number a held-out sample in each
    analyticlogprob_rewsample_RUN    log P(bad), mean reward, mean return: one number a measurement in each
    f_q_rew_kltoprior_ent_RUN        nothing, the mean reward of every update, nothing, nothing
    neg_data_RUN_thrT.pkl            the set of distinct texts whose reward was below T

The first three are what `torch.save` makes of a tuple, the last is a pickle of strings. Reading them here runs no code
that a stranger put into them.
"""

import io
import json
import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import UserError
from trimtab.evaluate.tail_risk import Estimate, cvar, mean, probability_below
from trimtab.files import write_bytes, writing

HELD_OUT, ANALYTIC, UPDATES = "info_eval_", "analyticlogprob_rewsample_", "f_q_rew_kltoprior_ent_"
BOUNDS = ("low", "high", "log_low", "log_high")


@dataclass(frozen=True)
class HeldOut:
    """Samples of a trained model for held-out prompts, one entry a sample."""

    rewards: np.ndarray
    returns: np.ndarray  # reward minus the weighted KL of the whole answer
    token_kl: np.ndarray  # log p - log p_0, mean over the answer's tokens
    surprisal: np.ndarray  # -log p of the whole answer


@dataclass(frozen=True)
class Analytic:
    """Measurements before training and after each fit step, in order."""

    log_bad: list[float]
    rewards: list[float]
    returns: list[float]


def write_held_out(folder: Path, run: str, held_out: HeldOut) -> Path:
    return _write(folder / f"{HELD_OUT}{run}", [_vector(values) for values in vars(held_out).values()])


def read_held_out(path: Path) -> HeldOut:
    vectors = [np.asarray(vector, dtype=np.float64) for vector in _read(path, 4)]
    if len({vector.shape for vector in vectors}) != 1 or vectors[0].ndim != 1 or not len(vectors[0]):
        raise UserError(f"{path}: its four lists have different lengths or are empty; write it again")
    return HeldOut(*vectors)


def write_analytic(folder: Path, run: str, analytic: Analytic) -> Path:
    return _write(folder / f"{ANALYTIC}{run}", [_plain(values) for values in vars(analytic).values()])


def read_analytic(path: Path) -> Analytic:
    # The original leaves the returns of PPO empty.
    return Analytic(*([float(number) for number in values] for values in _read(path, 3)))


def write_updates(folder: Path, run: str, rewards: Sequence[float]) -> Path:
    """The mean reward of every update so far."""
    return _write(folder / f"{UPDATES}{run}", [[], _plain(rewards), [], []])


def write_bad_texts(folder: Path, run: str, texts: Collection[str], threshold: float) -> Path:
    path = folder / f"neg_data_{run}_thr{threshold}.pkl"
    _replace(path, pickle.dumps(set(texts), protocol=4))
    return path


def read_bad_texts(path: Path) -> set[str]:
    try:
        texts = _PlainUnpickler(path.open("rb")).load()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: cannot be read as a set of texts ({error})") from error
    return set(texts)


def summary(
    held_out: HeldOut, thresholds: Sequence[float], levels: Sequence[float], prompts: Sequence[int] | None = None
) -> dict[str, Any]:
    """The figures of an evaluation, ready for JSON; thresholds and levels may be chosen long after the run.

    `low` and `high` speak of new answers to the same prompts; where `prompts` are known, `new_prompts` of new ones.
    """

    def both(figure: Callable[..., Estimate], *arguments: Any) -> dict[str, Any]:
        return in_both_ways(figure, *arguments, prompts=prompts)

    return {
        "samples": len(held_out.rewards),
        **({} if prompts is None else {"prompts": len(set(prompts))}),
        "reward": both(mean, held_out.rewards),
        "return": both(mean, held_out.returns),
        "kl_per_token": both(mean, held_out.token_kl),
        "worst_reward": float(held_out.rewards.min()),
        "below": {f"{t:g}": both(probability_below, held_out.rewards, t) for t in thresholds},
        "cvar": {f"{level:g}": both(cvar, held_out.rewards, level) for level in levels},
    }


def in_both_ways(figure: Callable[..., Any], *arguments: Any, prompts: Sequence[int] | None) -> dict[str, Any]:
    """An estimate with its interval for these prompts and, where they are known, for new ones."""
    found = asdict(figure(*arguments))
    if prompts is not None:
        bounds = {name: value for name, value in asdict(figure(*arguments, prompts)).items() if name in BOUNDS}
        found["new_prompts"] = bounds
    return found


def write_summary(folder: Path, run: str, figures: dict[str, Any]) -> Path:
    path = folder / f"{HELD_OUT}{run}.json"
    _replace(path, (json.dumps(figures, indent=1) + "\n").encode())
    return path


class _PlainUnpickler(pickle.Unpickler):
    """Strings, numbers and collections of them need no class, so any class is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, not only texts")


def _vector(values: Any) -> Any:
    import torch

    return torch.as_tensor(np.asarray(values), dtype=torch.float32)


def _plain(values: Sequence[float]) -> list[float]:
    """Numbers of numpy or torch are classes to a reader that knows none."""
    return [float(number) for number in values]


def _write(path: Path, parts: list[Any]) -> Path:
    import torch

    whole = io.BytesIO()
    torch.save(tuple(parts), whole)
    _replace(path, whole.getvalue())
    return path


def _replace(path: Path, content: bytes) -> None:
    with writing(f"--save_info_path {path}: cannot write there"):
        write_bytes(path, content)


def _read(path: Path, count: int) -> list[Any]:
    import torch

    try:
        parts = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path, or run the evaluation that writes it") from None
    except Exception as error:  # whatever a broken archive or a refused pickle raises
        raise UserError(f"{path}: damaged, or it holds other things than numbers; write it again") from error
    if not isinstance(parts, tuple | list) or len(parts) != count:
        raise UserError(f"{path}: {count} lists are expected in a file of this name")
    return list(parts)
