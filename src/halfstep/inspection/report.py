"""The result of an inspection, as frozen records and as data for JSON; and contradictions with other statements."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.bits.origin import Origin
from halfstep.bits.scan import Statistics
from halfstep.bits.sentences import Evidence, Layer, PrecisionVerdict, SchemeReport
from halfstep.bits.what_if import WhatIf
from halfstep.inspection.schemes import SCHEMES, written
from halfstep.text import grouped, percent, printable, shortened


SCHEMA = 1
"""The version of `to_dict`: fields are added under the same number, and renamed or dropped under the next."""
LISTED = 10
"""How many remarks of a kind are printed."""


@dataclass(frozen=True)
class TensorReport:
    """One tensor. Without `statistics` for integers, packed codes, and in a quick look."""

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
    """The first tensor with equal bytes elsewhere."""
    layer: Layer | None = None
    """For codes, their quantized weight."""


@dataclass(frozen=True)
class RoleReport:
    """All tensors of one role."""

    role: str
    tensors: int
    numel: int
    nbytes: int
    dtypes: Mapping[str, int]
    """Numbers of values by stored type."""
    verdict: PrecisionVerdict
    statistics: Statistics | None = None


@dataclass(frozen=True)
class Inspection:
    """The result of inspecting a checkpoint. `verdict` is on the model's parameters, without optimizer state."""

    path: Path
    kind: str
    files: tuple[str, ...]
    tensors: tuple[TensorReport, ...]
    roles: tuple[RoleReport, ...]
    verdict: PrecisionVerdict
    config_dtype: str | None = None
    """The dtype in config.json; no evidence."""
    known: "Known | None" = None
    contradictions: tuple[str, ...] = ()
    quick: bool = False
    casts: tuple[WhatIf, ...] = ()
    """The costs of casts, if these were asked for."""
    schemes: tuple[SchemeReport, ...] = ()
    """The quantized layers, if there are any."""
    findings: tuple[str, ...] = ()
    """Broken quantized layers."""
    remarks: tuple[str, ...] = ()
    """Parts of the files that were not read."""

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
        """The path, the kind of file, the number of tensors and their bytes, as text."""
        size = f"{self.nbytes / 1e9:.3g} GB" if self.nbytes >= 1e8 else f"{self.nbytes / 1e6:.3g} MB"
        files = f"{len(self.files)} files" if len(self.files) != 1 else "1 file"
        return f"{printable(str(self.path))}: {self.kind}, {files}, {len(self.tensors)} tensors, {size}"

    @property
    def conclusion(self) -> str:
        """The verdict on the model's parameters."""
        return f"verdict ({self.verdict.confidence}): {printable(self.verdict.text)}"

    @property
    def alarms(self) -> list[str]:
        """Contradictions, parts that were not read, and broken layers, one line each; only the first of many."""
        return [
            *(f"contradiction: {printable(text)}" for text in self.contradictions),
            *_first("", self.remarks, "that were not read"),
            *_first("broken: ", self.findings, "broken layers"),
        ]

    @property
    def claims(self) -> list[str]:
        """The statements of config.json and the knowledge base, one line each."""
        config = [] if self.config_dtype is None else [f"config.json says {printable(self.config_dtype)}"]
        known = self.known
        return config + ([] if known is None else [f"{printable(known.source)} says: {printable(known.text)}"])

    def to_dict(self) -> dict[str, Any]:
        """Data for JSON."""
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


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Known:
    """Statements about the model: the types in which it was trained ("bf16"), and their source."""

    source: str
    computes: tuple[str, ...]
    text: str = ""


def contradictions(weights: Sequence[Evidence], config: str | None, known: Known | None) -> Iterator[str]:
    """Contradictions between the bits of the weights and the type that config.json names, or what is known of the
    model.

    Only results that a type cannot produce are contradictions: values exactly bf16 in a model said to be fp16. Full
    mantissas do not contradict training in bf16, which may have kept a master copy in float32.
    """
    plain = [one for one in weights if one.layer is None]  # for codes config.json names the type of computation
    told = [
        (name, one.numel)
        for one in plain
        if one.origin is not None and one.origin.share == 1 and one.origin.scale is None
        if one.origin.confidence in ("certain", "likely")
        for name in one.origin.through
    ]
    sized = {dtype: sum(sizes) for dtype, sizes in grouped((one.dtype, one.numel) for one in plain).items()}
    through = {name: sum(sizes) for name, sizes in grouped(told).items()}
    total = sum(sized.values()) or 1
    most = max(sized, key=lambda name: sized[name], default=None)
    past = [name for name, values in through.items() if 2 * values > total and name in ("bf16", "fp16")]
    if config is not None and most is not None and config != most and sized.get(config, 0) < sized[most]:
        yield f"config.json says {config}; {percent(sized[most] / total)} of the values are stored as {most}"
    for name in past:
        if config is not None and _SHORT.get(config, config) != name:
            yield f"config.json says {config}; the bits say {name} origin"
        if known is not None and known.computes and name not in known.computes:
            yield f"{known.source} says trained in {', '.join(known.computes)}; the bits say {name} origin"


def disagreements(config: Mapping[str, object] | None, layers: Sequence[Layer]) -> tuple[str, ...]:
    """Differences between the `quantization_config` of a config.json and the layers in the files, in words.

    It compares the method, the bits per code, and the block sizes, as far as both sides have them.
    """
    if config is None:
        return ()
    largest = max(layers, key=lambda layer: layer.values, default=None)
    holds = "no quantised layer of a known layout" if largest is None else f"{largest.scheme}: {largest.text}"
    declared = config.get("quantization_config")
    if not isinstance(declared, Mapping):
        return () if largest is None else (f"config.json names no quantisation; the files hold {holds}",)
    method = str(declared.get("quant_method", "")).lower()
    known = {scheme.name for scheme in SCHEMES if method in scheme.methods}
    if known and (largest is None or largest.scheme not in known):
        return (f"config.json says quantised by {method}; the files hold {holds}",)
    return () if largest is None else tuple(_sizes(declared, largest, holds))


def _sizes(declared: Mapping[str, object], layer: Layer, holds: str) -> Iterator[str]:
    weights = _weights(declared)
    bits = next((weights[key] for key in ("bits", "w_bit", "num_bits") if isinstance(weights.get(key), int)), None)
    bits = 4 if declared.get("load_in_4bit") is True else 8 if declared.get("load_in_8bit") is True else bits
    if bits is not None and bits != layer.code_bits:
        yield f"config.json says {bits} bits a weight; the files hold {holds}"
    block = declared.get("weight_block_size")
    if isinstance(block, list) and block and "block" in layer.tile and written(block) != layer.tile.split()[0]:
        yield f"config.json says blocks of {written(block)}; the files hold {holds}"
    group = next((weights[key] for key in ("group_size", "q_group_size") if isinstance(weights.get(key), int)), None)
    sizes = [int(size) for size in layer.tile.split()[0].split("x")] if "block" in layer.tile else []
    if isinstance(group, int) and group > 0 and sizes and group != max(sizes):
        yield f"config.json says groups of {group}; the files hold {holds}"


def _weights(declared: Mapping[str, object]) -> Mapping[str, object]:
    """The settings for weights: those of compressed-tensors' first group, or the top-level ones."""
    groups = declared.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    return weights if isinstance(weights, Mapping) else declared
