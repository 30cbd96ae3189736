"""`trimtab ppo --ray` under the name that OpenRLHF's documents give RL of every kind."""

from trimtab.cli.main import job_main

main = job_main("ppo", lambda words: ["--ray", "True", *words])  # first, so that --ray False keeps its meaning

if __name__ == "__main__":
    raise SystemExit(main())
