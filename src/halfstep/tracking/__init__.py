"""Look at the numbers of a training step. This room only reads."""

from halfstep.bits.histogram import ExponentHistogram
from halfstep.tracking.descent import (
    Arrival,
    Arrivals,
    Zeros,
    arrival,
    arrivals,
    share_lost,
    share_zeroed,
    vanished_states,
    zeros,
)
from halfstep.tracking.log import Log, scalars, track
from halfstep.tracking.nonfinite import activation_gradients, activation_gradients_by_module, first_nonfinite, magnitude
from halfstep.tracking.operands import (
    Amaxes,
    OperandError,
    amaxes,
    exponents,
    operand_error,
    operand_errors,
    saturated_share,
)
from halfstep.tracking.saved import SavedBytes, SavedRow, saving
from halfstep.tracking.sharpness import logit_sharpness


__all__ = [
    "Amaxes",
    "Arrival",
    "Arrivals",
    "ExponentHistogram",
    "Log",
    "OperandError",
    "SavedBytes",
    "SavedRow",
    "Zeros",
    "activation_gradients",
    "activation_gradients_by_module",
    "amaxes",
    "arrival",
    "arrivals",
    "exponents",
    "first_nonfinite",
    "logit_sharpness",
    "magnitude",
    "operand_error",
    "operand_errors",
    "saturated_share",
    "saving",
    "scalars",
    "share_lost",
    "share_zeroed",
    "track",
    "vanished_states",
    "zeros",
]
