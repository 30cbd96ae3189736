"""Whether the layers of the roles' models are compiled, as the loop knows it (train/compiling.py decides)."""

from trimtab.config.jobs import RLOptions
from trimtab.data.prompts import PromptStore
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

    def columns(self) -> dict[str, float]:
        """For the first row of metrics."""
        seconds, self._seconds = self._seconds, 0.0
        return {"seconds_compile": seconds} if seconds else {}
