"""Models as servers load them, and back: what is served is what training saw."""

from halfstep.serving.export import GGUF, Exported, check_format, export, layouts_of
from halfstep.serving.load import from_pretrained


__all__ = ["GGUF", "Exported", "check_format", "export", "from_pretrained", "layouts_of"]
