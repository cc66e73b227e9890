"""What names a model: a name as people write and derive it, taken apart; or a local Hugging Face folder's origin."""

import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from halfstep.errors import KnowledgeBaseError


VARIANTS = frozenset(
    {
        "chat", "instruct", "it", "sft", "dpo", "orpo", "rlhf", "preview", "thinking", "zero", "coder", "code", "math",
        "vl", "turbo", "en", "lora", "qlora", "adapter", "peft", "finetuned",
        "qat",
    }
)  # fmt: skip
"""Words of a name that say it was trained on from another model."""

_ENDS = frozenset({"lora", "qlora", "adapter", "peft", "finetuned"})  # what follows these names the data
_SAME = frozenset({"hf", "pt", "meta"})  # the same model in another file
_SIZES = frozenset(
    {"tiny", "xsmall", "mini", "small", "base", "medium", "large", "xlarge", "xl", "xxl", "huge", "giant"}
)
_TOKEN = re.compile(r"(?:\d+x\d+b|a\d+b|\d+(?:\.\d+)?[bmtke])(?![a-z0-9])|[a-z]+|\d+")
_SIZE = re.compile(r"\d+x\d+b|a?\d+(?:\.\d+)?[bmt]|\d+e")  # parameters, all or active, or experts
_DATE = re.compile(r"\d{4}|\d{6}|\d{8}|\d+k")  # of a release, or the length of its context
_FILES = {"config.json", "adapter_config.json", "README.md"}
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".distcp", ".h5", ".msgpack")
_BASES = 100  # origins of a folder; a merge of models has a few
_LIMIT = 1 << 20  # a model card or a config.json is far smaller; nothing is read beyond


@dataclass(frozen=True)
class Spelling:
    """A name taken apart."""

    core: tuple[str, ...]
    """Words and numbers of the family and its generation."""
    sizes: tuple[str, ...]
    variants: frozenset[str]
    key: str
    """Core and sizes as they stand, without punctuation."""

    @property
    def series(self) -> str:
        """The core alone."""
        return "".join(self.core)

    @property
    def numbered(self) -> bool:
        """Whether the name says which generation it is of."""
        return any(token.isdigit() for token in self.core)


@lru_cache(1 << 12)
def spelling(name: str) -> Spelling:
    """Take a name apart; what stands before its last slash says whose it is, and is left out.

    >>> spelled = spelling("meta-llama/Llama-2-7b-chat-hf")
    >>> spelled.core, spelled.sizes, set(spelled.variants)
    (('llama', '2'), ('7b',), {'chat'})
    """
    tail = name.rpartition("/")[2].casefold().replace("fine-tuned", "finetuned").replace("fine tuned", "finetuned")
    tokens: list[str] = []
    for token in _TOKEN.findall(tail):
        tokens.append(token)
        if token in _ENDS:
            break
    sized = any(map(_SIZE.fullmatch, tokens))
    sizes = [t for t in tokens if _SIZE.fullmatch(t) or (t in _SIZES and not (sized and t == "base"))]
    variants = frozenset(t for t in tokens if t in VARIANTS or _DATE.fullmatch(t))
    left = [t for t in tokens if t not in variants and t not in _SAME and not (sized and t == "base")]
    return Spelling(tuple(t for t in left if t not in sizes), tuple(sizes), variants, "".join(left))


def means(one: Spelling, other: Spelling) -> bool:
    """Whether a name is of the other, or of a variant of it: with its sizes, or of its series where it gives none."""
    return bool(one.core) and (other.key == one.key if one.sizes else other.series == one.series)


def may_be(one: Spelling, other: Spelling) -> bool:
    """Whether a name without a size and a number leaves open which generation it is of, of which the other is one."""
    following = other.core[len(one.core) :]
    unclear = not one.numbered and not one.sizes and other.core[: len(one.core)] == one.core
    return unclear and bool(following) and (following[0].isdigit() or following[0] == "v")


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
