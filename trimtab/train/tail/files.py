"""What a tail run leaves on disk beside what RL runs do: bad texts, metric files in RePULSe's layout, a proposal.

save_path/         proposal/ of repulse; bad_texts.jsonl with --save_negdata
save_info_path/    the files that evaluate/tail_files.py describes, under the run's name
"""

from pathlib import Path
from typing import Any

from trimtab.config.jobs import TailOptions
from trimtab.config.repulse_spelling import run_name
from trimtab.evaluate import tail_files
from trimtab.files import writing
from trimtab.train.metrics import MetricsFile, read_rows
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.files import RunFiles

BAD_TEXTS = "bad_texts.jsonl"


class TailFiles(RunFiles):
    options: TailOptions

    def __init__(self, options: TailOptions, *parts: Any):
        super().__init__(options, *parts)
        self.name = run_name(options)
        self.info = Path(options.save_info_path or options.save_path)
        self._bad: MetricsFile | None = None

    def open(self, start: int, roles: Any, *, resumed: bool) -> None:
        super().open(start, roles, resumed=resumed)
        if self.options.save_negdata:
            with writing(f"--save_path {self.folder}: cannot write there"):
                self._bad = MetricsFile(self.folder / BAD_TEXTS, resume_from=start if resumed else None)

    def close(self) -> None:
        super().close()
        if self._bad is not None:
            self._bad.close()

    def bad_texts(self, experience: Experience) -> list[str]:
        """Of --save_negdata: prompt and answer of the samples with a reward below the threshold."""
        if not self.options.save_negdata:
            return []
        bad = (experience.rewards_S < self.options.save_negdata_threshold).nonzero()[:, 0].tolist()
        ids = [experience.prompt(i) + experience.response(i) for i in bad]
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def keep_bad_texts(self, step: int, texts: list[str]) -> None:
        if texts:
            assert self._bad is not None
            with writing(f"--save_path {self.folder}: cannot write there"):
                self._bad.write({"step": step, "texts": sorted(set(texts))})

    def write_history(self) -> None:
        """The files that tell of the whole training: the metrics have it all, also what was before a resume."""
        options, rows = self.options, read_rows(self.folder / "metrics.jsonl")
        updates = [row for row in rows if row["step"] > 0]
        tail_files.write_updates(self.info, self.name, [row["reward"] for row in updates])
        if options.analytic_bad_word_calc:
            measured = [row for row in rows if "log_bad_probability" in row]
            # Before the first update nothing has been sampled: the first rollout stands for the start.
            sampled = [updates[0], *(row for row in measured if row["step"] > 0)]
            analytic = tail_files.Analytic(
                [row["log_bad_probability"] for row in measured],
                [row["reward"] for row in sampled],
                [row["reward"] - row.get("kl_coefficient", 0.0) * row.get("kl_answer", 0.0) for row in sampled],
            )
            tail_files.write_analytic(self.info, self.name, analytic)
        if options.save_negdata:
            texts = {text for row in read_rows(self.folder / BAD_TEXTS) for text in row["texts"]}
            place = Path(options.negdata_path) if options.negdata_path else self.info
            tail_files.write_bad_texts(place, self.name, texts, options.save_negdata_threshold)

    def _export(self, roles: Any, folder: Path) -> None:
        super()._export(roles, folder)
        if roles.proposal is not None:
            self._save(roles.proposal, folder / "proposal")
