"""`python -m contbatch_cli` is `contbatch`."""

from contbatch_cli.cli.app import main

if __name__ == "__main__":
    main()
