"""`python -m halfstep.claims.checks ID` prints the figures of one check as JSON."""

import json
import sys
from collections.abc import Sequence

from halfstep.claims.checks.base import get_check
from halfstep.errors import HalfstepError


def main(arguments: Sequence[str]) -> int:
    """Print the figures of the named check; the exit code is 2 if there is no such check."""
    if len(arguments) != 1:
        print("usage: python -m halfstep.claims.checks ID; `halfstep claims` lists the ids", file=sys.stderr)
        return 2
    try:
        print(json.dumps(get_check(arguments[0]).measure(), indent=2))
    except HalfstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
