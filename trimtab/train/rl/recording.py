"""Rollouts and their rewards on disk, one file an iteration: to learn from them again without sampling.

With the same options a replayed run makes the updates of the run that was recorded, bit for bit.
"""

import json
import os
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from trimtab.errors import UserError
from trimtab.train.rl.experience import Experience

Sampled = tuple[Experience, int, dict[str, float]]  # what was sampled, from how many prompts, and its figures


class Recording:
    def __init__(self, folder: Path, group: int):
        """`group`: answers to a prompt."""
        self.folder, self.group = folder, group

    def write(self, iteration: int, sampled: Sampled) -> None:
        experience, prompts, figures = sampled
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(iteration)
        beside = path.with_name(f".{path.name}-{os.getpid()}")
        described = {"group": self.group, "prompts": prompts, "figures": figures}
        save_file(experience.tensors(), beside, metadata={"iteration": json.dumps(described)})
        os.replace(beside, path)

    def read(self, iteration: int) -> Sampled:
        path = self._path(iteration)
        if not path.is_file():
            raise UserError(f"--replay {self.folder}: the recording has no iteration {iteration + 1} ({path.name})")
        with safe_open(path, framework="pt") as file:
            described = json.loads(file.metadata()["iteration"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if described["group"] != self.group:
            raise UserError(
                f"--replay {self.folder}: it was recorded with --n_samples_per_prompt {described['group']}, "
                f"not {self.group}; give the same"
            )
        return Experience.from_tensors(tensors), described["prompts"], described["figures"]

    def _path(self, iteration: int) -> Path:
        return self.folder / f"iteration{iteration + 1:06d}.safetensors"
