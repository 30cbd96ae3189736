"""The folder of a run while it works: locked against other runs, and marked until its model is whole."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trimtab.config.dump import to_yaml
from trimtab.distributed.process_group import World
from trimtab.errors import UserError
from trimtab.files import (
    locked,
    mark_finished,
    mark_unfinished,
    remove_leftovers,
    write_json,
    write_text,
    writing,
)
from trimtab.models.load import TrainedModelOptions
from trimtab.train.earlier_runs import make_way

MODELS = ("critic", "proposal")  # folders of other models inside


class RunFolder:
    def __init__(self, options: TrainedModelOptions, manifest: dict, world: World | None = None):
        self.options, self.manifest = options, manifest
        self.path = Path(options.save_path)
        self.world = world or World()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For this run alone. One process locks for all, and all are told if it cannot."""
        with ExitStack() as locks:
            problem = None
            if self.world.leads:
                try:
                    make_way(self.options, self.world.say)
                    for flag, folder in ((flag, Path(place)) for flag, place in self.options.own_folders.items()):
                        with writing(f"--{flag} {folder}: cannot write there"):
                            locks.enter_context(locked(flag, folder))
                except UserError as error:
                    problem = str(error)
            if told := next((found for found in self.world.gather(problem) if found), None):
                raise UserError(told)
            yield

    def describe(self) -> None:
        """From here on the folder is this run's, and whatever model is in it an earlier one's."""
        with writing(f"--save_path {self.path}: cannot write there"):
            for folder in (self.path, *(self.path / name for name in MODELS)):
                remove_leftovers(folder)
            mark_unfinished(self.path)
            write_text(self.path / "options.yaml", to_yaml(self.options))
            write_json(self.path / "manifest.json", self.manifest)

    def finish(self) -> None:
        if self.world.leads:
            mark_finished(self.path)
