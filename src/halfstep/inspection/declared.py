"""What others say of a model, config.json or a paper, compared with what its files hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from halfstep.bits.layer import Layer
from halfstep.bits.sentences import Evidence, percent
from halfstep.inspection.schemes import SCHEMES


_BITS = ("bits", "w_bit", "num_bits")
_GROUPS = ("group_size", "q_group_size")
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Known:
    """What others state about the model: the types it was trained in ("bf16"), and who says so."""

    source: str
    computes: tuple[str, ...]
    text: str = ""


def contradictions(weights: Sequence[Evidence], config: str | None, known: Known | None) -> tuple[str, ...]:
    """Where the bits of the weights contradict the type that config.json names, or what is known of the model.

    What a type could not have left behind is a contradiction: values exactly bf16 in a model said to be fp16. Full
    mantissas are not a contradiction for a model trained in bf16, which may have kept a master copy in float32.
    """
    sized: dict[str, int] = {}
    through: dict[str, int] = {}
    for one in weights:
        if one.layer is not None:
            continue  # codes: config.json names the type to compute in
        sized[one.dtype] = sized.get(one.dtype, 0) + one.numel
        if (
            one.origin is not None
            and one.origin.share == 1
            and one.origin.scale is None
            and one.origin.confidence in ("certain", "likely")
        ):
            for name in one.origin.through:
                through[name] = through.get(name, 0) + one.numel
    total = sum(sized.values()) or 1
    most = max(sized, key=lambda name: sized[name], default=None)
    past = [name for name, values in through.items() if 2 * values > total and name in ("bf16", "fp16")]
    found = []
    if config is not None and most is not None and config != most and sized.get(config, 0) < sized[most]:
        found.append(f"config.json says {config}; {percent(sized[most] / total)} of the values are stored as {most}")
    for name in past:
        if config is not None and _SHORT.get(config, config) != name:
            found.append(f"config.json says {config}; the bits say {name} origin")
        if known is not None and known.computes and name not in known.computes:
            found.append(f"{known.source} says trained in {', '.join(known.computes)}; the bits say {name} origin")
    return tuple(found)


def disagreements(config: Mapping[str, object] | None, layers: Sequence[Layer]) -> tuple[str, ...]:
    """Where the `quantization_config` of a config.json and the layers in the files differ, in words.

    It compares the method, the bits of a code, and the sizes of blocks, as far as both sides say them.
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
    bits = next((weights[key] for key in _BITS if isinstance(weights.get(key), int)), None)
    bits = 4 if declared.get("load_in_4bit") is True else 8 if declared.get("load_in_8bit") is True else bits
    if bits is not None and bits != layer.code_bits:
        yield f"config.json says {bits} bits a weight; the files hold {holds}"
    block = declared.get("weight_block_size")
    if isinstance(block, list) and block and "block" in layer.tile and _written(block) != layer.tile.split()[0]:
        yield f"config.json says blocks of {_written(block)}; the files hold {holds}"
    group = next((weights[key] for key in _GROUPS if isinstance(weights.get(key), int)), None)
    sizes = [int(size) for size in layer.tile.split()[0].split("x")] if "block" in layer.tile else []
    if isinstance(group, int) and group > 0 and sizes and group != max(sizes):
        yield f"config.json says groups of {group}; the files hold {holds}"


def _weights(declared: Mapping[str, object]) -> Mapping[str, object]:
    """The settings of weights: those of compressed-tensors' first group, or the top ones."""
    groups = declared.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    return weights if isinstance(weights, Mapping) else declared


def _written(block: Sequence[object]) -> str:
    return "x".join(str(size) for size in block)
