"""`python -m aiozc`: hands over to the command line in `aiozc.cli`, and does nothing itself."""

from aiozc.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
