"""What was shown of the Triton kernels without a GPU, kept by `make gpu-proofs`: `halfstep doctor` says it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Proof:
    """One kernel: compiled for a GPU that was not there, and equal to the reference in Triton's interpreter."""

    kernel: str
    formats: int
    """On how many formats."""
    launches: int
    """Kinds of launch that were compiled: dtypes, roundings, scales."""
    instructions: tuple[float, float]
    """An element, of a full block: the least and the most of the formats."""
    triton: str
    capability: str

    def __str__(self) -> str:
        low, high = self.instructions
        units = f"sm_{self.capability.replace('.', '')}"
        return (
            f"compiles for {units} in {self.launches} ways, {low:g} to {high:g} instructions an element; equal in the "
            f"interpreter (triton {self.triton})"
        )


def proofs() -> list[Proof]:
    """Every kernel's."""
    kept = json.loads((files("halfstep.kernels.gpu") / "proofs.json").read_text())
    found = []
    for kernel, formats in kept["kernels"].items():
        counts = [row["instructions"] for row in formats.values()]
        launches = sum(row["launches"] for row in formats.values())
        ends = min(counts), max(counts)
        found.append(Proof(kernel, len(formats), launches, ends, kept["triton"], kept["capability"]))
    return found
