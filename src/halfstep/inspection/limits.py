"""How much a checkpoint may make its reader hold: far above what real ones need, far below what a machine has.

Together they keep the memory of opening and reading below 300 MB, whatever a file says of itself.
"""

from halfstep.errors import CheckpointError


TENSORS = 200_000
"""Tensors in one checkpoint; a mixture of 60 layers with 384 experts each, scales apart, has 140 thousand."""

TEXT = 64 << 20
"""Bytes of a JSON header or index; the largest real ones hold some 20 million."""

PARSED = 160 << 20
"""Bytes that the objects made of a header may take, by the parsers' own upper estimates."""

DIMENSIONS = 64
"""Dimensions of a tensor, as in torch and numpy."""

REPEATS, SMALL = 64, 1 << 30
"""Tensors may together claim 64 times the bytes of their files (strides of 0, compression) and one GiB more."""


def check_count(count: int, what: object) -> None:
    """Check a number of tensors before they are made.

    Raises:
        CheckpointError: it is above the limit.
    """
    if count > TENSORS:
        raise CheckpointError(f"{what}: {count} tensors; expected at most {TENSORS}")
