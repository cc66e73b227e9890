"""`python -m halfstep`."""

from halfstep.cli.app import main


main()
