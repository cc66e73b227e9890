"""The columns of the tables in GPU memory that an optimizer launch over many tensors reads."""

WEIGHT, GRAD, KEPT = 0, 1, 2
"""Columns of a tensor's row, all int64: first addresses. KEPT is the tensor that the master keeps."""
FIRST, FIRST_SCALE, FIRST_EXPONENT, FIRST_CENTER = 3, 4, 5, 6
SECOND, SECOND_SCALE, SECOND_EXPONENT, SECOND_CENTER = 7, 8, 9, 10
RESIDUAL = 11
STEP = 12
"""The address of its step count, a float32."""
SIZE, START, RUN, STRIDE = 13, 14, 15, 16
"""The number of elements; element i of a shard is element START + i // RUN * STRIDE + i % RUN of the whole tensor."""
SEED, INDEX, GROUP = 17, 18, 19
WEIGHT_SCALE, GRAD_SCALE, KEPT_SCALE = 20, 21, 22
"""Addresses of the scales, for tensors stored as codes under one scale."""
SHARED = 23
"""The address of a moment that is one scalar per tensor."""
COLUMNS = 24

SIGN, AT, COUNT, GIVEN = 0, 1, 2, 3
"""Columns of a group's row, all float64: the factor on gradients; the offset and the number of its rows in the list of
values by step, the last of which holds for all later steps; and from GIVEN on the group's options."""
OPTIONS = 16

GO, LOW, HIGH = 0, 1, 2
"""Columns of a tensor's scalars in a step, 32 bits each: whether it is taken, and the halves of its seed."""
WEIGHT_OLD, GRAD_OLD, KEPT_OLD, FIRST_OLD, SECOND_OLD = 3, 4, 5, 6, 7
"""Scales before the step, float32."""
SCALE, TAKEN = 8, 9
"""The gradient's factor, float32, and from TAKEN on the scalars that elements take, norms last."""
NUMBERS = 24

FIRST_MOST, SECOND_MOST, WEIGHT_MOST, MOST = 0, 1, 2, 3
"""Amaxes after the step, as int32 bits, of tensors stored as codes under one scale."""
