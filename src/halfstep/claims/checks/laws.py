"""Checks of scaling laws: predictions of published constants, computed again."""

from dataclasses import replace
from statistics import fmean

from halfstep.claims.checks.base import Numbers, check
from halfstep.law import KUMAR, Width


@check("kumar-effective")
def effective_parameters() -> Numbers:
    """The best width by the published constants: with the appendix's offsets, and in the main text's form."""
    gamma = fmean(width.gamma for width in KUMAR.widths.values())
    averaged = replace(KUMAR, widths=dict.fromkeys(KUMAR.widths, Width(gamma)))
    plain = KUMAR.without_offsets()
    shares = {f"share_{bits}": KUMAR.share(dict.fromkeys(KUMAR.widths, bits)) for bits in (4, 8)}
    found = {"offsets": KUMAR.best_bits(), "without": plain.best_bits(), "averaged": averaged.best_bits()}
    small, large = (KUMAR.best_for(compute)[0] for compute in (1e19, 1e24))
    return {**found, **shares, "small": small, "large": large}
