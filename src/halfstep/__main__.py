"""`python -m halfstep`."""

from halfstep.cli.app import main


if __name__ == "__main__":
    main()
