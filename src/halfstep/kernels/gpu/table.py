"""Where things stand in what one launch over many tensors reads: tables in the device's memory."""

from __future__ import annotations


WEIGHT, GRAD, KEPT = 0, 1, 2
"""Columns of a tensor's row, all int64: addresses first. What is kept is what its master keeps."""
FIRST, FIRST_SCALE, FIRST_EXPONENT, FIRST_CENTER = 3, 4, 5, 6
SECOND, SECOND_SCALE, SECOND_EXPONENT, SECOND_CENTER = 7, 8, 9, 10
RESIDUAL = 11
STEP = 12
"""The address of its count of steps, a float32."""
SIZE, START, RUN, STRIDE = 13, 14, 15, 16
"""How many elements there are; element i is number START + i // RUN * STRIDE + i % RUN of the unsharded tensor."""
SEED, INDEX, GROUP = 17, 18, 19
WEIGHT_SCALE, GRAD_SCALE, KEPT_SCALE = 20, 21, 22
"""Addresses of the scales of what is codes under one."""
COLUMNS = 23

SIGN, BETA1, REST1, BETA2, REST2, L2, DECAY, LR, EPS = range(9)
"""Options of a group, all float64."""
FIRST_AT, FIRST_COUNT, SECOND_AT, SECOND_COUNT = 9, 10, 11, 12
"""Where in the corrections those of the group's two betas stand, and how many there are: the last one stays."""
OPTIONS = 13

GO, AT_FIRST, LOW, HIGH = 0, 1, 2, 3
"""Numbers of a tensor's step, 32 bits each: whether there is one, whether it is the first, and its seed's halves."""
SCALE = 4
"""From SCALE on, float32: the gradient's factor, beta1, rest1, beta2, rest2, l2, keep, step size, rescale and eps."""
WEIGHT_OLD, GRAD_OLD, KEPT_OLD, FIRST_OLD, SECOND_OLD = 14, 15, 16, 17, 18
"""Scales as they were before the step, float32."""
NUMBERS = 19

FIRST_MOST, SECOND_MOST, WEIGHT_MOST, MOST = 0, 1, 2, 3
"""Largest magnitudes that a step leaves, as int32 bits, where codes under one scale are to hold them."""
