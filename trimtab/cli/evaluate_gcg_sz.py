"""`trimtab attack` under the name that RePULSe's documents give it."""

from trimtab.cli.attack import main

if __name__ == "__main__":
    raise SystemExit(main())
