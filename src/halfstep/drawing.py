"""Common settings of the figures that commands draw: font and colours, independent of a user's matplotlib settings."""

from collections.abc import Iterator
from contextlib import contextmanager

from halfstep.errors import MissingLibraryError


try:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ModuleNotFoundError as error:
    raise MissingLibraryError(
        f"plots are drawn with {error.name}, which is not installed; install it with pip install 'halfstep[lab]', or "
        "ask for --json"
    ) from error


__all__ = ["FAINT", "INK", "Figure", "MaxNLocator", "drawing"]

INK, FAINT = "#1d2228", "#6b737c"


@contextmanager
def drawing(width: float, height: float) -> Iterator[Figure]:
    """A context with a new figure of `width` x `height` inches and the common settings."""
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9, "text.usetex": False, "text.parse_math": False}):
        figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
