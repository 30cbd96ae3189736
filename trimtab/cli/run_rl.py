"""`trimtab rl --config FILE` under the name that PaddleNLP's documents give it: `python -m trimtab.cli.run_rl FILE`."""

from trimtab.cli.main import job_main
from trimtab.config.job_file import with_config

main = job_main("rl", with_config)
if __name__ == "__main__":
    raise SystemExit(main())
