"""``python -m meshwright``: the command line."""

from meshwright.cli import main

if __name__ == "__main__":
    main()
