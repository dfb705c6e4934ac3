"""`python -m flows.cli`: the same as `cram`."""

from flows.cli.main import main

if __name__ == "__main__":
    main()
