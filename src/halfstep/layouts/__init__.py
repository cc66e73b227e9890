"""Layouts of quantised weights in files that servers load: which tensors a layer has, and what config.json says."""

from halfstep.errors import LayoutError, one_of
from halfstep.layouts.base import Layout
from halfstep.quant import Quantizer
from halfstep.registry import family


__all__ = ["Layout", "fitting", "get_layout", "list_layouts"]


_by_name = family("halfstep.layouts.named", Layout)


def list_layouts() -> list[str]:
    """The names of all layouts."""
    return sorted(_by_name())


def get_layout(name: str | Layout) -> Layout:
    """The layout of that name; a `Layout` is returned as it is.

    Raises:
        LayoutError: no layout has that name; the nearest are shown.
    """
    return name if isinstance(name, Layout) else _by_name()[one_of("layout", name, _by_name(), LayoutError)]


def fitting(quantizers: tuple[Quantizer, ...], inputs: tuple[Quantizer | None, ...] = ()) -> list[Layout]:
    """The layouts that hold, bit for bit, what all these quantizers make of weights; the closest one first.

    Closest is a layout of the same elements and of tiles as they are. A static one comes last, and only where it holds
    what all these quantizers, of which there are some, make of inputs.
    """
    static = bool(inputs)
    able = [
        layout
        for layout in _by_name().values()
        if all(layout.refusal(quantizer) is None for quantizer in quantizers)
        and (not layout.static or (static and all(layout.input_refusal(quantizer) is None for quantizer in inputs)))
    ]
    return sorted(able, key=lambda layout: (layout.static, *layout.distance(quantizers), layout.rank))
