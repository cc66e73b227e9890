"""Models as servers load them, and back: what is served is what training saw."""

from halfstep.serving.export import Exported, export, layouts_of
from halfstep.serving.load import from_pretrained


__all__ = ["Exported", "export", "from_pretrained", "layouts_of"]
