"""The jobs there are, for tests that hold for each of them."""

from trimtab.config import jobs

EVERY_JOB = [known for known in vars(jobs).values() if isinstance(known, type) and "verb" in vars(known)]
