"""Where things stand in what one launch over many tensors reads: tables in the device's memory."""

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
SHARED = 23
"""The address of a moment that is one number of the tensor."""
COLUMNS = 24

SIGN, AT, COUNT, GIVEN = 0, 1, 2, 3
"""Of a group, all float64: what gradients are multiplied by; where in the table of what follows from the step's number
its rows stand, and how many there are, of which the last one stays; and from GIVEN on its options."""
OPTIONS = 16

GO, LOW, HIGH = 0, 1, 2
"""Numbers of a tensor's step, 32 bits each: whether there is one, and its seed's halves."""
WEIGHT_OLD, GRAD_OLD, KEPT_OLD, FIRST_OLD, SECOND_OLD = 3, 4, 5, 6, 7
"""Scales as they were before the step, float32."""
SCALE, TAKEN = 8, 9
"""The gradient's factor, float32, and from TAKEN on the numbers that elements take, norms last."""
NUMBERS = 24

FIRST_MOST, SECOND_MOST, WEIGHT_MOST, MOST = 0, 1, 2, 3
"""Largest magnitudes that a step leaves, as int32 bits, where codes under one scale are to hold them."""
