"""What was shown of the Triton kernels without a GPU, kept by `make gpu-proofs`: `halfstep doctor` says it."""

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
    instructions: float
    """An element of a full block, at most."""
    triton: str
    capability: str

    def __str__(self) -> str:
        return (
            f"compiles for sm_{self.capability.replace('.', '')}, at most {self.instructions:.0f} instructions an "
            f"element (launches of {self.launches} kinds, formats: {self.formats}); equal in the interpreter, "
            f"triton {self.triton}"
        )


def proofs() -> list[Proof]:
    """Every kernel's."""
    kept = json.loads((files("halfstep.kernels.gpu") / "proofs.json").read_text())
    found = []
    for kernel, formats in kept["kernels"].items():
        launches = sum(row["launches"] for row in formats.values())
        most = max(row["instructions"] for row in formats.values())
        found.append(Proof(kernel, len(formats), launches, most, kept["triton"], kept["capability"]))
    return found
