"""Look at the numbers of a training step. This room only reads."""

from halfstep.bits.histogram import ExponentHistogram
from halfstep.tracking.descent import Arrival, Arrivals, arrival, arrivals
from halfstep.tracking.gradients import activation_gradients
from halfstep.tracking.histogram import exponents
from halfstep.tracking.nonfinite import first_nonfinite
from halfstep.tracking.operands import OperandError, operand_error, operand_errors
from halfstep.tracking.zeroed import share_lost, share_zeroed


__all__ = [
    "Arrival",
    "Arrivals",
    "ExponentHistogram",
    "OperandError",
    "activation_gradients",
    "arrival",
    "arrivals",
    "exponents",
    "first_nonfinite",
    "operand_error",
    "operand_errors",
    "share_lost",
    "share_zeroed",
]
