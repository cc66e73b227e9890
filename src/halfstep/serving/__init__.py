"""Models as servers load them, and back: what is served is what training saw."""

from halfstep.serving.export import Exported, export, layouts_of


__all__ = ["Exported", "export", "layouts_of"]
