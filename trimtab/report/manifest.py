"""Which runs belong into a figure: a YAML or JSON file that names them, method by method and seed by seed.

    info: ./info                      folder of the metric files (what --save_info_path was)
    checkpoints: ./ckpt               folder in which attacks left gcg_eval_*.jsonl
    threshold: -5                     rewards below it are bad
    level: 0.0001                     of CVaR
    methods:
      - label: RePULSe, beta -10      shown in the legend
        run: rlhf_..._s{seed}         name of a run; {seed} stands for each of
        seeds: [1, 2, 3]
        family: RePULSe               points of one family are joined; unset: the label
        samples: 250000               sequences sampled in the whole run, for the axis of curves

A run that is named and has no file is a mistake and told as one: nothing is left out silently.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trimtab.errors import UserError

TOP = {"info": str, "checkpoints": str, "threshold": (int, float), "level": (int, float), "methods": list}
OF_A_METHOD = {"label": str, "run": str, "seeds": list, "family": str, "samples": int}


@dataclass(frozen=True)
class Method:
    label: str
    run: str
    seeds: tuple[int, ...]
    family: str
    samples: int | None

    def names(self) -> list[str]:
        """The name of each seed's run."""
        return [self.run.replace("{seed}", str(seed)) for seed in self.seeds]


@dataclass(frozen=True)
class Manifest:
    path: Path
    methods: list[Method]
    info: Path
    checkpoints: Path
    threshold: float | None
    level: float | None

    def __post_init__(self):
        if self.level is not None and not 0 < self.level <= 1:
            raise UserError(
                f"{self.path}: level is {self.level:g}; it is a share of the rewards, above 0 and at most 1"
            )

    @property
    def folder(self) -> Path:
        return self.path.parent


def read_manifest(path: str | Path) -> Manifest:
    """Folders in it are seen from where it lies."""
    path = Path(path).expanduser()
    content = _checked(_content(path), TOP, str(path))
    entries = content.get("methods")
    if not entries:
        raise UserError(f"{path}: methods is missing or empty; list the runs of each method there")
    methods = [_method(entry, f"{path} method {number}") for number, entry in enumerate(entries, start=1)]
    labels = [method.label for method in methods]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(f"{path}: two methods are called {twice!r}; give each its own label")
    info, checkpoints = (path.parent / Path(content.get(name, ".")).expanduser() for name in ("info", "checkpoints"))
    return Manifest(path, methods, info, checkpoints, content.get("threshold"), content.get("level"))


def _content(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the manifest of a figure") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML or JSON: {' '.join(str(error).split())[:150]}") from None


def _checked(content: Any, known: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise UserError(f"{where}: names and values are needed ({', '.join(known)})")
    for name, value in content.items():
        if name not in known:
            raise UserError(f"{where}: unknown name {name}; known are {', '.join(known)}")
        if not isinstance(value, known[name]) or isinstance(value, bool):
            raise UserError(f"{where}: {name} has the value {value!r}, which is of the wrong kind")
    return content


def _method(entry: Any, where: str) -> Method:
    entry = _checked(entry, OF_A_METHOD, where)
    for name in ("label", "run", "seeds"):
        if not entry.get(name):
            raise UserError(f"{where}: {name} is missing")
    seeds = entry["seeds"]
    if not all(isinstance(seed, int) for seed in seeds) or len(set(seeds)) < len(seeds):
        raise UserError(f"{where}: seeds are different whole numbers, such as [1, 2, 3]")
    if len(seeds) > 1 and "{seed}" not in entry["run"]:
        raise UserError(
            f"{where}: run names one run for {len(seeds)} seeds; write {{seed}} where the seed stands in it"
        )
    label = entry["label"]
    return Method(label, entry["run"], tuple(seeds), entry.get("family", label), entry.get("samples"))
