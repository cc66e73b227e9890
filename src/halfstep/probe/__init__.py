"""Is this model safe in fp16, or another format? Measured forward and backward, then run for real."""

from halfstep.probe.mismatch import Mismatch, mismatch
from halfstep.probe.probe import probe_model
from halfstep.probe.report import Conditions, ProbeReport
from halfstep.probe.spread import Scales, Spread, scales
from halfstep.probe.target import Target, target
from halfstep.probe.trial import Failure, Trial
from halfstep.probe.window import Window


__all__ = [
    "Conditions",
    "Failure",
    "Mismatch",
    "ProbeReport",
    "Scales",
    "Spread",
    "Target",
    "Trial",
    "Window",
    "mismatch",
    "probe_model",
    "scales",
    "target",
]
