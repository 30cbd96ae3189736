"""Answers to many prompts, or scores of answers: `trimtab generate`, or `python -m trimtab.cli.batch_inference`."""

from trimtab.cli.main import job_main

main = job_main("generate")

if __name__ == "__main__":
    raise SystemExit(main())
