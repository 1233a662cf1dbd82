"""`python -m ckpt`: the `ckpt` command."""

from ckpt.cli.main import main

if __name__ == "__main__":
    main()
