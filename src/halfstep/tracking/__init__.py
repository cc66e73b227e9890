"""Measurements of a training step's values. This room only reads."""

from halfstep.bits.histogram import ExponentHistogram
from halfstep.tracking.log import Log, scalars, track
from halfstep.tracking.nonfinite import activation_gradients, activation_gradients_by_module, first_nonfinite, magnitude
from halfstep.tracking.saved import SavedBytes, SavedRow, saving
from halfstep.tracking.step import (
    Amaxes,
    Arrival,
    Arrivals,
    OperandError,
    Zeros,
    amaxes,
    arrival,
    arrivals,
    exponents,
    logit_sharpness,
    operand_error,
    operand_errors,
    saturated_share,
    share_lost,
    share_zeroed,
    vanished_states,
    zeros,
)


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
