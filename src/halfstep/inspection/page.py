"""A report as one HTML page that needs no network, and runs nothing."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from halfstep.bits.sentences import percent
from halfstep.errors import CheckpointError
from halfstep.inspection import plot
from halfstep.inspection.report import Inspection, TensorReport
from halfstep.printable import printable


try:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
except ModuleNotFoundError as error:
    raise CheckpointError(
        f"the HTML page is written with {error.name}, which is not installed; install it with "
        "pip install 'halfstep[lab]', or ask for --json"
    ) from error


def to_html(report: Inspection) -> str:
    """The page. Every text of the checkpoint is escaped, and the page may load nothing and run no script."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"printable": printable, "percent": percent}
    style = _part("page.css")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    counted = any(role.statistics and role.statistics.nonzero for role in report.roles)
    return environment.from_string(_part("page.html")).render(
        report=report,
        style=Markup(style),
        policy=f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'",
        outliers=_outliers(report),
        copies=[tensor for tensor in report.tensors if tensor.tied_to or tensor.duplicate_of],
        picture=base64.b64encode(plot.png(report)).decode() if counted else None,
    )


def _outliers(report: Inspection) -> list[TensorReport]:
    """Tensors with outlier channels, those that stand out most first; tied ones once."""
    found = [(t.statistics.channels, t) for t in report.tensors if t.statistics is not None and t.tied_to is None]
    ratios = [(c.largest / c.median, tensor) for c, tensor in found if c is not None and c.outliers]
    return [tensor for _, tensor in sorted(ratios, key=lambda item: -item[0])]


def _part(name: str) -> str:
    return files("halfstep.inspection").joinpath(name).read_text(encoding="utf-8")
