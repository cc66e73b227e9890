"""The results of `make gpu-proofs`, which tests the Triton kernels without a GPU; `halfstep doctor` prints them."""

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Proof:
    """One kernel: compiled for a GPU without having one, and equal to the reference in Triton's interpreter."""

    kernel: str
    formats: int
    """The number of formats."""
    launches: int
    """The number of launch variants compiled: dtypes, roundings, scales."""
    instructions: float
    """The largest number of instructions an element of a full block."""
    triton: str
    capability: str

    def __str__(self) -> str:
        return (
            f"compiles for sm_{self.capability.replace('.', '')}, at most {self.instructions:.0f} instructions an "
            f"element (launches of {self.launches} kinds, formats: {self.formats}); equal in the interpreter, "
            f"triton {self.triton}"
        )


def proofs() -> list[Proof]:
    """The results for every kernel."""
    kept = json.loads((files("halfstep.kernels.gpu") / "proofs.json").read_text())
    found = []
    for kernel, formats in kept["kernels"].items():
        launches = sum(row["launches"] for row in formats.values())
        most = max(row["instructions"] for row in formats.values())
        found.append(Proof(kernel, len(formats), launches, most, kept["triton"], kept["capability"]))
    return found
