"""Write models in the formats that servers load, and load them back, with the weights that training used."""

from halfstep.serving.export import GGUF, Exported, check_format, export, layouts_of
from halfstep.serving.load import from_pretrained


__all__ = ["GGUF", "Exported", "check_format", "export", "from_pretrained", "layouts_of"]
