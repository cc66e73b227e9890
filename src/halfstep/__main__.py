"""The `halfstep` command, also as `python -m halfstep`. Ctrl-C ends it without a traceback, also during imports."""

import sys


try:
    from halfstep.cli.app import main
except KeyboardInterrupt:
    sys.exit(130)


if __name__ == "__main__":
    main()
