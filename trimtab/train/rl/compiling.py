"""Whether the layers of the roles' models are compiled, as the loop knows it (train/compiling.py decides)."""

from trimtab.config.jobs import RLOptions
from trimtab.data.prompts import PromptStore
from trimtab.train.compiling import given_up
from trimtab.train.rl.role_groups import Roles

NAMES = ("actor", "critic", "reference", "teacher", "reward")
WRITTEN = 0.5  # of the tokens that an answer may have, before any is known


class RoleCompiling:
    """`decided`: by role, whether its layers are compiled; None: not yet."""

    def __init__(self, options: RLOptions, prompts: PromptStore, iterations: int):
        self.decided: dict[str, bool] | None = None
        self._seconds = 0.0
        answers = options.n_samples_per_prompt * options.generate_max_len * WRITTEN
        self._tokens = iterations * options.rollout_batch_size * (float(prompts.lengths.mean()) + answers)
        self._epochs = options.max_epochs

    def settle(self, roles: Roles) -> dict[str, bool]:
        """Before the first iteration, also of a resumed run, and for roles that were built anew."""
        decided: dict[str, bool] = {}
        for name in NAMES:
            if (role := getattr(roles, name)) is None:
                continue
            before = None if self.decided is None else self.decided.get(name, False)
            found = role.call("compile_layers", learnt=self._tokens * self._epochs, scored=self._tokens, decided=before)
            decided[name], seconds = found[0]["compiled"], found[0]["seconds"]
            self._seconds += seconds
            for line in found[0]["lines"]:
                print(line, flush=True)
        self.decided = decided
        return decided

    def look(self, roles: Roles) -> bool:
        """Before an iteration: whether compiled layers, of any role, had to be given up."""
        compiled = [getattr(roles, name) for name, is_compiled in (self.decided or {}).items() if is_compiled]
        problems = [problem for role in compiled for problem in role.call("layers_problem") if problem]
        if not problems:
            return False
        for role in compiled:
            role.call("leave_layers_plain")
        self.decided = dict.fromkeys(self.decided or {}, False)
        print(given_up(problems[0]), flush=True)
        return True

    def columns(self) -> dict[str, float]:
        """For the first row of metrics."""
        seconds, self._seconds = self._seconds, 0.0
        return {"seconds_compile": seconds} if seconds else {}
