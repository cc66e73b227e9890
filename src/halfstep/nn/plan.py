"""`Plan`: what a recipe does to a model, as `halfstep.plan` computes it and `apply` carries it out."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import prod
from textwrap import TextWrapper
from typing import Any

import torch

from halfstep.ops.native import matmuls_text
from halfstep.recipe import DTYPES, BytesPerParameter, LinearSpec, Recipe, matmul_texts
from halfstep.text import grouped as by_key, shortened


_COLUMNS = 80
_HOST = (
    "native matmuls: an eager layer whose rows x in x out is below about 1e11 takes the host longer than the GPU, and "
    "longer than in bf16 (measured on an H200): replay whole steps, halfstep.GraphedStep"
)


@dataclass(frozen=True)
class PlannedLayer:
    """The operand formats, dtypes and device of one layer's three matmuls."""

    kind: str
    """The name of the layer's class."""
    spec: LinearSpec
    """The quantizers of the operands."""
    dtype: torch.dtype
    """The dtype of the results."""
    device: torch.device
    experts: int = 0
    """The number of experts whose matrices each of its parameters holds; 0 for an ordinary layer."""

    @property
    def matmuls(self) -> tuple[str, ...]:
        """The formats of each matmul's operands, as text."""
        return matmul_texts(self.spec)

    @property
    def computed(self) -> str:
        """Whether the device computes the matmuls natively or emulates them, in which dtype and why, as text."""
        return matmuls_text(self.spec, self.dtype, self.device)


@dataclass(frozen=True)
class Plan:
    """The changes that a recipe makes to a model, and the layers that it leaves alone. Printed in at most 60 lines."""

    recipe: Recipe
    model: str
    """The name of the model's class."""
    stored: dict[str, int]
    """The number of parameters stored in each dtype; for a quantized model, in each format."""
    layers: dict[str, PlannedLayer]
    """The layers whose matmuls round their operands, by path."""
    kept: dict[str, str]
    """Parameters and layers that do not follow the recipe, with the reason."""
    matmuls: int = 0
    """The number of layers whose matmuls a rule could round."""
    attention: tuple[str, ...] = ()
    """The modules that round the operands of attention's two matmuls."""
    smoothed: tuple[str, ...] = ()
    """The gated MLPs whose gated product is scaled before the down-projection rounds it."""
    saved: tuple[str, ...] = ()
    """The modules some or all of whose saved tensors are stored in few bits."""
    sought: dict[str, str] = field(default_factory=dict)
    """Optional rules that round and match no layer, by what they are for (such as attention): their globs. A layer of
    that kind with another name follows a later rule."""
    states: int = 0
    """The number of scaling states, which `scaler.update()` advances."""
    optimizer: str | None = "Adam"
    """The optimizer that bytes are counted for; None for a model for inference."""
    moments: Sequence[str] | None = None
    """The names of the optimizer's moments; None: Adam's."""
    later: "tuple[tuple[str, Plan], ...]" = ()
    """For a recipe with stages: when each later stage begins, and its plan."""

    @property
    def bytes(self) -> BytesPerParameter | None:
        """The bytes of one parameter by role; None for a model for inference."""
        if self.optimizer is None:
            return None
        if self.moments is None:
            return self.recipe.bytes_per_parameter()
        return self.recipe.bytes_per_parameter(self.moments)

    @property
    def compute(self) -> str:
        """The dtype of autocast around the forward, or "as stored", in words."""
        stage = self.recipe.by_stage[0]
        dtype = str(DTYPES[stage.compute]).removeprefix("torch.")
        return "as stored" if stage.compute == "fp32" else f"torch.autocast to {dtype}"

    @property
    def quantized(self) -> tuple[str, ...]:
        """The paths of `layers`."""
        return tuple(self.layers)

    @property
    def headline(self) -> str:
        """The plan in one line."""
        ways = " and ".join(dict.fromkeys(computed.split(" (")[0] for (_, computed), _ in self._ways))
        rounded = f"{len(self.layers)} of {self.matmuls} matmul layers round their operands, {ways}"
        size = f"; {self.bytes.total:.4g} bytes a parameter with {self.optimizer}" if self.bytes else ""
        return f"{self.model} under {self.recipe.name}: {rounded if ways else 'no matmul rounds its operands'}{size}"

    def to_dict(self) -> dict[str, Any]:
        """The plan as data for JSON."""
        layers = {
            path: {
                "kind": self.layers[path].kind,
                "experts": self.layers[path].experts,
                "matmuls": matmuls,
                "computed": computed,
            }
            for (matmuls, computed), paths in self._ways
            for path in paths
        }
        own = ("model", "stored", "kept", "matmuls", "attention", "smoothed", "saved", "sought", "states", "optimizer")
        return {
            "recipe": self.recipe.name,
            **{name: getattr(self, name) for name in own},
            "layers": layers,
            "compute": self.compute,
            "loss_scale": str(self.recipe.loss_scale or "none"),
            "bytes_per_parameter": self.bytes and {**asdict(self.bytes), "total": self.bytes.total},
            "later": [{"from": when, **plan.to_dict()} for when, plan in self.later],
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, storage: bool = True) -> str:
        """What `print` shows; `storage=False` leaves out the lines on dtypes and bytes of parameters."""
        lines = [*_filled(self.headline, ""), *(self._storage() if storage else ()), *self._modules()]
        for when, plan in self.later:
            lines += [f"from {when}: {plan.recipe.name}", *(f"  {line}" for line in plan._modules())]
        if self.optimizer is not None and any(layer.computed.startswith("native") for layer in self.layers.values()):
            lines += _filled(_HOST)
        lines += _filled("not seen: functional calls in the model's own code; they follow torch.autocast's lists")
        return shortened(lines)

    def _storage(self) -> Iterator[str]:
        yield from _filled(f"parameters: {', '.join(f'{count:,} in {dtype}' for dtype, count in self.stored.items())}")
        if self.bytes is not None:
            yield from _filled(f"bytes a parameter: {self.bytes}, with {self.optimizer}")
        states = f"; scaling states: {self.states}" if self.states else ""
        yield from _filled(f"forward: {self.compute}; loss scale: {self.recipe.loss_scale or 'none'}{states}")
        yield from _filled(f"batch: {self.recipe.batch_text}") if self.recipe.shared_in_a_call else ()

    @cached_property
    def _ways(self) -> list[tuple[tuple[tuple[str, ...], str], list[str]]]:
        """The layers' paths, grouped by how their matmuls round and what computes these."""
        alike = by_key((replace(layer, kind="", experts=0), path) for path, layer in self.layers.items())
        return [((layer.matmuls, layer.computed), paths) for layer, paths in alike.items()]

    def _modules(self) -> Iterator[str]:
        for (matmuls, computed), paths in self._ways:
            yield from _filled(f"{len(paths)} layers, {computed}")
            for matmul in matmuls:
                yield from _filled(matmul, "    ")
            yield from _listed(paths)
            stacks = [layer for path in paths if (layer := self.layers[path]).experts]
            for experts, count in Counter(layer.experts for layer in stacks).items():
                said = "every expert's operands are rounded by themselves, with scales of their own"
                if stacks[0].spec.states:
                    said = "all experts share a scaling state for each operand"
                yield from _filled(f"stacks of {experts} experts ({count}): {said}", "    ")
        for said, these in (
            ("attention's two matmuls round their operands", self.attention),
            ("gated product smoothed", self.smoothed),
            ("saved for the backward pass in few bits", self.saved),
        ):
            if these:
                yield f"  {said}"
                yield from _listed(these)
        for what, globs in self.sought.items():
            yield from _filled(f"no layer is matched as {what}, by {globs}: later rules apply")
        for reason, paths in by_key((reason, path) for path, reason in self.kept.items()).items():
            yield from _filled(f"kept as it was: {reason}")
            yield from _listed(paths)


def _listed(paths: Any) -> Iterator[str]:
    for pattern, count in grouped(paths).items():
        yield from _filled(pattern + (f" ({count})" if count > 1 else ""), "      ")


def _filled(text: str, indent: str = "  ") -> list[str]:
    return TextWrapper(_COLUMNS, indent, f"{indent}    ", break_long_words=False, break_on_hyphens=False).wrap(text)


def grouped(paths: Iterable[str]) -> dict[str, int]:
    """Patterns that together stand for exactly these paths, with the number of paths of each, in the paths' order.

    >>> grouped(["h.0.q_proj", "h.0.k_proj", "h.1.q_proj", "h.1.k_proj", "head"])
    {'h.0-1.{q,k}_proj': 4, 'head': 1}
    """
    numbered = by_key(
        (tuple("#" if part.isdecimal() else part for part in parts), tuple(map(int, filter(str.isdecimal, parts))))
        for parts in (path.split(".") for path in paths)
    )
    alike: dict[tuple[str, str], list[str]] = {}
    counts: dict[tuple[str, str], int] = {}
    for shape, found in numbered.items():
        for numbers in _products(found):
            texts = iter([_ranges(column) for column in numbers])
            *above, last = (next(texts) if part == "#" else part for part in shape)
            key = ".".join(above), "" if shape[-1] != "#" else last
            alike.setdefault(key, []).append(last)
            counts[key] = counts.get(key, 0) + prod(map(len, numbers))
    return {f"{above}.{_braced(names)}".lstrip("."): counts[above, key] for (above, key), names in alike.items()}


def _products(found: Sequence[tuple[int, ...]]) -> list[tuple[list[int], ...]]:
    """Cartesian products that together are these tuples: of each product, the list of numbers at each position."""
    columns = tuple(sorted(set(column)) for column in zip(*found, strict=True))
    if prod(map(len, columns)) == len(found):
        return [columns]
    rest = groupby(sorted(found), key=lambda numbers: numbers[0])
    return [([first], *tail) for first, same in rest for tail in _products([numbers[1:] for numbers in same])]


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as `0-2,5`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda place: place[1] - place[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _braced(names: Sequence[str]) -> str:
    """Several names as `{a,b}_tail`; the part after the last underscore is written once if all share it."""
    if len(names) == 1:
        return names[0]
    tail = f"_{names[0].rpartition('_')[2]}"
    tail = tail if all(name.endswith(tail) for name in names) else ""
    return "{" + ",".join(name.removesuffix(tail) for name in names) + "}" + tail
