"""What an inspection found, as frozen records, and as data for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.bits.layer import Layer, SchemeReport
from halfstep.bits.origin import Origin
from halfstep.bits.statistics import Statistics
from halfstep.bits.verdict import PrecisionVerdict
from halfstep.bits.what_if import WhatIf
from halfstep.inspection.declared import Known
from halfstep.printable import printable, shortened


SCHEMA = 1
"""The version of `to_dict`: fields are added under the same number, and renamed or dropped under the next."""
LISTED = 10
"""How many remarks of a kind are printed."""


@dataclass(frozen=True)
class TensorReport:
    """One tensor. Without `statistics`: no floating point, or packed codes, or a quick look."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    file: str
    statistics: Statistics | None = None
    origin: Origin | None = None
    tied_to: str | None = None
    """The first tensor that is stored in the same bytes of the file."""
    duplicate_of: str | None = None
    """The first tensor that has equal bytes elsewhere."""
    layer: Layer | None = None
    """Of codes, the quantised weight that they are of."""


@dataclass(frozen=True)
class RoleReport:
    """All tensors of one role."""

    role: str
    tensors: int
    numel: int
    nbytes: int
    dtypes: Mapping[str, int]
    """Values by stored type."""
    verdict: PrecisionVerdict
    statistics: Statistics | None = None


@dataclass(frozen=True)
class Inspection:
    """What the bits of a checkpoint say. `verdict` is on the model's parameters, without optimizer state."""

    path: Path
    kind: str
    files: tuple[str, ...]
    tensors: tuple[TensorReport, ...]
    roles: tuple[RoleReport, ...]
    verdict: PrecisionVerdict
    config_dtype: str | None = None
    """The type that config.json names; no evidence."""
    known: Known | None = None
    contradictions: tuple[str, ...] = ()
    quick: bool = False
    casts: tuple[WhatIf, ...] = ()
    """What casts would cost, where that was asked for."""
    schemes: tuple[SchemeReport, ...] = ()
    """The quantised layers, where there are any."""
    findings: tuple[str, ...] = ()
    """What is broken in them."""
    remarks: tuple[str, ...] = ()
    """What of the files was not read."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, tied ones once."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.tied_to is None)

    @property
    def numel(self) -> int:
        """Values of all tensors, tied ones once."""
        return sum(tensor.numel for tensor in self.tensors if tensor.tied_to is None)

    def __str__(self) -> str:
        roles = [
            f"{role.role}: {role.tensors} tensors, {role.numel:,} values, {printable(role.verdict.text)}"
            for role in self.roles
        ]
        schemes = [f"{one.size}, {one.values:,} weights: {one.text}" for one in self.schemes]
        return shortened([self.title, self.conclusion, *self.alarms, *self.claims, *roles, *schemes])

    @property
    def title(self) -> str:
        """What was read: the path, the kind of file, the number of tensors and their bytes."""
        size = f"{self.nbytes / 1e9:.3g} GB" if self.nbytes >= 1e8 else f"{self.nbytes / 1e6:.3g} MB"
        files = f"{len(self.files)} files" if len(self.files) != 1 else "1 file"
        return f"{printable(str(self.path))}: {self.kind}, {files}, {len(self.tensors)} tensors, {size}"

    @property
    def conclusion(self) -> str:
        """The verdict on the model's parameters."""
        return f"verdict ({self.verdict.confidence}): {printable(self.verdict.text)}"

    @property
    def alarms(self) -> list[str]:
        """What contradicts the verdict, was not read or is broken, a line each; of many the first."""
        return [
            *(f"contradiction: {printable(text)}" for text in self.contradictions),
            *_first("", self.remarks, "that were not read"),
            *_first("broken: ", self.findings, "broken layers"),
        ]

    @property
    def claims(self) -> list[str]:
        """What config.json and the knowledge base say, a line each."""
        config = [] if self.config_dtype is None else [f"config.json says {printable(self.config_dtype)}"]
        known = self.known
        return config + ([] if known is None else [f"{printable(known.source)} says: {printable(known.text)}"])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": SCHEMA,
            "path": str(self.path),
            "kind": self.kind,
            "quick": self.quick,
            "files": list(self.files),
            "numel": self.numel,
            "nbytes": self.nbytes,
            "verdict": asdict(self.verdict),
            "config_dtype": self.config_dtype,
            "known": None if self.known is None else asdict(self.known),
            "contradictions": list(self.contradictions),
            "schemes": [{**asdict(one), "bits": one.bits} for one in self.schemes],
            "findings": list(self.findings),
            "remarks": list(self.remarks),
            "casts": [
                {**asdict(one.total), "worst": [{"tensor": name, **asdict(cast)} for name, cast in one.worst]}
                for one in self.casts
            ],
            "roles": [asdict(role) for role in self.roles],
            "tensors": [_tensor(tensor) for tensor in self.tensors],
        }


def _first(before: str, texts: Sequence[str], what: str) -> list[str]:
    more = [f"and {len(texts) - LISTED} more {what}: --json prints all"] if len(texts) > LISTED else []
    return [before + printable(text) for text in texts[:LISTED]] + more


def _tensor(tensor: TensorReport) -> dict[str, Any]:
    origin = tensor.origin
    said = None if origin is None else {**asdict(origin), "key": origin.key, "confidence": origin.confidence}
    layer = None if tensor.layer is None else {**asdict(tensor.layer), "text": tensor.layer.text}
    return {**asdict(tensor), "origin": said, "layer": layer}
