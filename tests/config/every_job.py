"""The jobs there are, for tests that hold for each of them."""

from trimtab.config import jobs

EVERY_JOB = list(jobs.JOBS.values())
