"""What a local Hugging Face folder says about where its model comes from."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import KnowledgeBaseError


_FILES = {"config.json", "adapter_config.json", "README.md"}
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".distcp", ".h5", ".msgpack")
_BASES = 100  # origins of a folder; a merge of models has a few
_LIMIT = 1 << 20  # a model card or a config.json is far smaller; nothing is read beyond


@dataclass(frozen=True)
class Folder:
    """The models that a folder names as its origin, and the type its weights are stored in (which proves nothing)."""

    bases: tuple[str, ...]
    stored_dtype: str | None


def is_folder(model_id: str) -> bool:
    """Whether a model id is the path of a folder on this machine that holds a model, as `from_pretrained` decides; one
    that is empty, or holds other things, is a name that a folder happens to have."""
    path = os.path.expanduser(model_id)
    if not model_id or not os.path.isdir(path):
        return False
    return _cached_id(Path(path)) != [] or any(name in _FILES or name.endswith(_WEIGHTS) for name in os.listdir(path))


def read_folder(path: str) -> Folder:
    """What README.md (its `base_model`), config.json and adapter_config.json name as the base model.

    A folder of the hub's own cache also has the model's id in its path.

    Raises:
        KnowledgeBaseError: a config.json that is not a JSON object, or a card that names more models than any merge.
    """
    folder = Path(os.path.expanduser(path))
    config = _json(folder / "config.json")
    named = [
        *_cached_id(folder),
        *_base_models(_text(folder / "README.md")),
        config.get("_name_or_path"),
        _json(folder / "adapter_config.json").get("base_model_name_or_path"),
    ]
    bases = dict.fromkeys(name for name in named if isinstance(name, str) and name)
    if len(bases) > _BASES:
        raise KnowledgeBaseError(
            f"{str(folder)!r} names {len(bases)} base models, expected at most {_BASES}; shorten base_model in its "
            "README.md, or name a hub id"
        )
    dtype = config.get("dtype", config.get("torch_dtype"))
    return Folder(tuple(bases), dtype if isinstance(dtype, str) else None)


def _cached_id(folder: Path) -> list[str]:
    names = [re.fullmatch(r"models--([^/]+?)--([^/]+)", part) for part in folder.resolve().parts]
    return [f"{found[1]}/{found[2]}" for found in names if found]


def _base_models(card: str) -> list[str]:
    """The `base_model` of a model card's header: one id, a list in brackets, or one id a line after dashes."""
    header = re.match(r"---[ \t]*\n(.*?\n)---", card.replace("\r\n", "\n"), flags=re.DOTALL)
    field = header and re.search(r"^base_model:(.*\n(?:[ \t]*-.*\n)*)", header[1], flags=re.MULTILINE)
    if not field:
        return []
    lines = re.split(r"[\n,]", field[1].replace("[", "").replace("]", ""))
    return [name for line in lines if (name := line.split(" #")[0].strip().removeprefix("- ").strip(" \t\"'"))]


def _json(file: Path) -> dict[str, Any]:
    text = _text(file)
    if not text:
        return {}
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KnowledgeBaseError(
            f"{str(file)!r} is not JSON: {error}; download the file again, or name a hub id"
        ) from None
    if not isinstance(data, dict):
        raise KnowledgeBaseError(
            f"{str(file)!r} holds a {type(data).__name__}, expected an object; download the file again, or name "
            "a hub id"
        )
    return data


def _text(file: Path) -> str:
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        return stream.read(_LIMIT).decode("utf-8", errors="replace")
