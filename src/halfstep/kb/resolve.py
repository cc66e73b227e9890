"""Find the entries for a model: by exact id, alias, glob, or base model of a local folder; and take names apart."""

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from halfstep.errors import KnowledgeBaseError
from halfstep.kb.reader import DEFAULT_OVERLAY, Entry, FailureReport, KnowledgeBase, load, matches


T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """The entries for a model, and how they were found."""

    model_id: str
    how: str
    """exact id, alias, glob, name (in another spelling), base model, or unknown."""
    matched: tuple[str, ...] = ()
    """The ids, aliases, globs or base models that led to the entries."""
    entries: tuple[Entry, ...] = ()
    """Empty, one, or those of a declared conflict."""
    failures: tuple[FailureReport, ...] = ()
    id_confirmed: bool = False
    """Whether a reference names this hub id; many ids in the data are from memory."""
    near: tuple[str, ...] = ()
    """For an unknown model: similar ids."""
    bases: tuple[str, ...] = ()
    """The models that a local folder names as its origin; for a quantised copy, the one in its name."""
    stored_dtype: str | None = None
    """For a local folder: the dtype in its config.json. Shown, and never used as evidence."""

    @property
    def known(self) -> bool:
        """Whether there is an entry."""
        return bool(self.entries)

    @property
    def conflict(self) -> bool:
        """Whether entries disagree."""
        return len({entry.train_precision for entry in self.entries}) > 1

    @property
    def tier(self) -> str | None:
        """definitive if every entry is and the model itself was found; inferred otherwise; None without an entry."""
        if not self.entries:
            return None
        definitive = self.how != "base model" and all(entry.tier == "definitive" for entry in self.entries)
        return "definitive" if definitive else "inferred"


def lookup(model_id: str, overlay: Path | str | None = DEFAULT_OVERLAY) -> Answer:
    """How a model was trained: for a hub id, an alias, or the path of a local Hugging Face folder.

    A folder is answered by the base models that it names, as inferred, whatever its own name. For a name, the first of
    these that finds an entry answers: the exact id, an alias, a glob; the same name with other punctuation and without
    its organisation ("Llama 2 7B", "llama2", a page's address, `@revision`); the model that a quantised copy is of
    ("org/Llama-2-7B-GPTQ"), or the model that a name says it was trained from ("Llama-2-chat", "gemma-2-9b-it",
    "Qwen2.5-Coder-7B"), both as inferred. The dtype that a checkpoint is stored in is never taken for the type it was
    trained in.

    >>> answer = lookup("meta-llama/Llama-2-7b-hf", overlay=None)
    >>> answer.entries[0].train_precision, answer.entries[0].released_dtype
    ('bf16_mixed', 'float16 (hub), bfloat16 (Meta)')

    Raises:
        KnowledgeBaseError: the overlay or the local folder cannot be read.
    """
    return find(load(overlay), model_id)


def find(base: KnowledgeBase, model_id: str) -> Answer:
    """`lookup` in a given knowledge base."""
    model_id = model_id.strip()
    return in_folder(base, model_id) if is_folder(model_id) else _with_similar(base, _of_a_name(base, model_id))


def in_folder(base: KnowledgeBase, path: str) -> Answer:
    """The answer from the origin that a local folder names, whatever the folder itself is called.

    Raises:
        KnowledgeBaseError: its config.json or model card cannot be read.
    """
    bases, stored_dtype = read_folder(path)
    answers = [_of_a_name(base, name) for name in bases]
    inherited = [found for found in answers if found.known]
    return Answer(
        path,
        "base model" if inherited else "unknown",
        matched=_unique(name for found in inherited for name in found.bases or (found.model_id,)),
        entries=_unique(entry for found in inherited for entry in found.entries),
        failures=_unique(report for found in answers for report in found.failures),
        bases=bases,
        stored_dtype=stored_dtype,
    )


def search(base: KnowledgeBase, text: str) -> tuple[Entry, ...]:
    """The entries in which every word of a text occurs, those with a word in a name first."""
    wanted = text.casefold().split()
    if not wanted:
        return ()
    hits = [entry for entry in base.entries if all(word in _text(entry) for word in wanted)]
    return tuple(sorted(hits, key=lambda entry: not any(word in _names(entry) for word in wanted)))


def _of_a_name(base: KnowledgeBase, model_id: str) -> Answer:
    plain = _SUFFIX.sub("", _ADDRESS.sub("", model_id))
    answer = _named(base, plain)
    if not answer.known and "/" not in plain:
        answer = _same_name(base, plain)
    original = _QUANTISED.sub("", plain)
    if not answer.known and original != plain:
        found = _named(base, original)
        found = found if found.known else _same_name(base, original.rpartition("/")[2])
        if found.known:
            failures = _unique((*found.failures, *answer.failures))
            answer = replace(found, how="base model", bases=found.matched, failures=failures, id_confirmed=False)
    if not answer.known:
        answer = _other_spelling(base, original, answer)
    return replace(answer, model_id=model_id)


_ADDRESS = re.compile(r"^(https?://)?(www\.)?(huggingface\.co|hf\.co)/(models/)?", re.IGNORECASE)
_SUFFIX = re.compile(r"(@[^/]+|/(tree|blob|resolve|raw|discussions)(/.*)?|/+)$", re.IGNORECASE)
_QUANTISED = re.compile(
    r"([-_.]+(gptq|awq|gguf|ggml|exl[23]|eetq|hqq|bnb|marlin|quantized|autoround|mlx|onnx|fp8|fp4|nf4|nvfp4|mxfp4"
    r"|int[48]|w\d+a\d+|[2-8]bits?|q[2-8](_(\d|[klms]|x{1,2}[sl]))*|\d+g|dynamic|static|channel|block))+$",
    re.IGNORECASE,
)
"""Endings of the names of quantised copies: -GPTQ, -AWQ-4bit-128g, -bnb-4bit, .Q4_K_M ..."""


def _same_name(base: KnowledgeBase, name: str) -> Answer:
    """The only entry with that name, ignoring punctuation, organisation and -hf."""
    key = _folded(name)
    found = {
        entry.id: [
            own
            for own in (entry.id, *entry.aliases, *entry.model_ids)
            if "*" not in own and key in _without_organisation(own)
        ]
        for entry in base.entries
    }
    entries = tuple(entry for entry in base.entries if found[entry.id])
    if not key or not _one(entries):
        return Answer(name, "unknown", failures=_failures(base, name, ()))
    matched = _unique(own for owns in found.values() for own in owns)
    reports = _unique(report for own in matched for report in _failures(base, own, entries))
    return Answer(name, "name", matched, entries, reports)


def _without_organisation(own: str) -> tuple[str, str]:
    """A name folded without its organisation, and also without -hf."""
    tail = own.rpartition("/")[2]
    return _folded(tail), _folded(tail.removesuffix("-hf"))


def _other_spelling(base: KnowledgeBase, name: str, answer: Answer) -> Answer:
    """The only entry whose model the name spells in another way, or names as the model it was trained from.

    Under an organisation of its own, a name without such a word may be anybody's model; "llama" may be any of them.
    """
    one = spelling(name)
    names = {entry.id: [own for own in (*entry.model_ids, *entry.aliases) if "*" not in own] for entry in base.entries}
    found = {key: [own for own in owns if means(one, spelling(own))] for key, owns in names.items()}
    entries = tuple(entry for entry in base.entries if found[entry.id])
    if not one.sizes:  # without a size, entries that conflict with a match count too
        entries = tuple(e for e in base.entries if e in entries or any(e.conflicts(other) for other in entries))
    others = (own for key, owns in names.items() if not found[key] for own in owns)
    if not _one(entries) or any(may_be(one, spelling(own)) for own in others):
        return answer
    matched = _unique(own for owns in found.values() for own in owns)
    same = any(one.variants <= spelling(own).variants for own in matched)
    if same and name.rpartition("/")[0].casefold() not in {"", *(own.rpartition("/")[0].casefold() for own in matched)}:
        return answer
    matched = matched if one.sizes else tuple(entry.id for entry in entries)
    failures = _unique((*answer.failures, *_failures(base, name, entries)))
    return Answer(name, "name" if same else "base model", matched, entries, failures, bases=() if same else matched)


def _one(entries: tuple[Entry, ...]) -> bool:
    """Whether entries are one answer: a single entry, or a declared conflict."""
    return bool(entries) and all(entry.conflicts(entries[0]) for entry in entries[1:])


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def _named(base: KnowledgeBase, model_id: str) -> Answer:
    key = model_id.casefold()
    ways: list[tuple[str, Callable[[Entry], list[str]]]] = [
        ("exact id", lambda entry: [name for name in entry.model_ids if name.casefold() == key]),
        ("alias", lambda entry: [name for name in (entry.id, *entry.aliases) if name.casefold() == key]),
        ("glob", lambda entry: entry.globs_over(model_id)),
    ]
    for how, names in ways:
        found = _overlay_first([entry for entry in base.entries if names(entry)])
        if found:
            matched = tuple(dict.fromkeys(names(entry)[0] for entry in found))
            confirmed = any(entry.confirms(model_id) for entry in found)
            return Answer(model_id, how, matched, found, _failures(base, model_id, found), confirmed)
    return Answer(model_id, "unknown", failures=_failures(base, model_id, ()))


def _overlay_first(found: list[Entry]) -> tuple[Entry, ...]:
    """The user's own entries before the package's, which then count only for a declared conflict."""
    own = [entry for entry in found if entry.overlay]
    if not own:
        return tuple(found)
    rivals = [entry for entry in found if not entry.overlay and any(entry.conflicts(mine) for mine in own)]
    return tuple(own + rivals)


def _failures(base: KnowledgeBase, model_id: str, entries: tuple[Entry, ...]) -> tuple[FailureReport, ...]:
    ids = {entry.id for entry in entries}
    return tuple(
        report
        for report in base.failures
        if ids & set(report.entries) or any(_matches_name(name, model_id) for name in report.model_ids)
    )


def _matches_name(pattern: str, name: str) -> bool:
    """Whether an id or a glob matches a name, which may lack the organisation and have other punctuation."""
    if "/" in name:
        return matches(pattern, name)
    return matches("*".join(map(_folded, pattern.rpartition("/")[2].split("*"))), _folded(name))


def _with_similar(base: KnowledgeBase, answer: Answer) -> Answer:
    """The answer; for an unknown model with similar ids added: the same name under another organisation first."""
    if answer.known:
        return answer
    names = [name for entry in base.entries for name in (*entry.model_ids, *entry.aliases) if "*" not in name]
    tail = answer.model_id.casefold().rsplit("/", 1)[-1]
    same = [name for name in names if name.casefold().rsplit("/", 1)[-1] == tail]
    folded = {name.casefold(): name for name in names}
    close = get_close_matches(answer.model_id.casefold(), folded, n=3, cutoff=0.7)
    near = tuple(dict.fromkeys([*same, *(folded[name] for name in close)]))
    return Answer(answer.model_id, "unknown", failures=answer.failures, near=near[:3])


def _unique(items: Iterable[T]) -> tuple[T, ...]:
    seen: list[T] = []
    for item in items:
        if item not in seen:
            seen.append(item)
    return tuple(seen)


def _names(entry: Entry) -> str:
    return " ".join((entry.id, entry.family, *entry.model_ids, *entry.aliases)).casefold()


def _text(entry: Entry) -> str:
    more = [entry.train_precision, entry.paraphrase, entry.notes or "", entry.hardware or "", entry.framework or ""]
    cited = [reference.locator for reference in entry.references]
    return " ".join((_names(entry), *entry.parts.values(), *more, *cited)).casefold()


# ---- what names a model: a name as people write and derive it, or a local folder's origin ---------------------------


VARIANTS = frozenset(
    {
        "chat", "instruct", "it", "sft", "dpo", "orpo", "rlhf", "preview", "thinking", "zero", "coder", "code", "math",
        "vl", "turbo", "en", "lora", "qlora", "adapter", "peft", "finetuned",
        "qat",
    }
)  # fmt: skip
"""Words in a name that say that it was trained from another model."""

_ENDS = frozenset({"lora", "qlora", "adapter", "peft", "finetuned"})  # the words after these name the data
_SAME = frozenset({"hf", "pt", "meta"})  # the same model in another file
_SIZES = frozenset(
    {"tiny", "xsmall", "mini", "small", "base", "medium", "large", "xlarge", "xl", "xxl", "huge", "giant"}
)
_TOKEN = re.compile(r"(?:\d+x\d+b|a\d+b|\d+(?:\.\d+)?[bmtke])(?![a-z0-9])|[a-z]+|\d+")
_SIZE = re.compile(r"\d+x\d+b|a?\d+(?:\.\d+)?[bmt]|\d+e")  # parameters (all or active), or experts
_DATE = re.compile(r"\d{4}|\d{6}|\d{8}|\d+k")  # a release date, or a context length
_FILES = {"config.json", "adapter_config.json", "README.md"}
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".distcp", ".h5", ".msgpack")
_BASES = 100  # the most base models of a folder; a merge has a few
_LIMIT = 1 << 20  # bytes read at most; a model card or a config.json is far smaller


@dataclass(frozen=True)
class Spelling:
    """A model's name split into parts."""

    core: tuple[str, ...]
    """Words and numbers of the family and its generation."""
    sizes: tuple[str, ...]
    variants: frozenset[str]
    key: str
    """Core and sizes in their order in the name, without punctuation."""

    @property
    def series(self) -> str:
        """The core only."""
        return "".join(self.core)

    @property
    def numbered(self) -> bool:
        """Whether the name contains the generation."""
        return any(token.isdigit() for token in self.core)


@lru_cache(1 << 12)
def spelling(name: str) -> Spelling:
    """Split a name into parts; everything up to its last slash is the organisation, and is left out.

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
    """Whether a name means the other, or a variant of it: with its sizes, or its series if it has no size."""
    return bool(one.core) and (other.key == one.key if one.sizes else other.series == one.series)


def may_be(one: Spelling, other: Spelling) -> bool:
    """Whether a name without size and number leaves the generation open, and the other is one of its generations."""
    following = other.core[len(one.core) :]
    unclear = not one.numbered and not one.sizes and other.core[: len(one.core)] == one.core
    return unclear and bool(following) and (following[0].isdigit() or following[0] == "v")


def is_folder(model_id: str) -> bool:
    """Whether a model id is the path of a local folder with a model, as `from_pretrained` decides. An empty folder, or
    one with other files, only happens to have that name."""
    path = os.path.expanduser(model_id)
    if not model_id or not os.path.isdir(path):
        return False
    return _cached_id(Path(path)) != [] or any(name in _FILES or name.endswith(_WEIGHTS) for name in os.listdir(path))


def read_folder(path: str) -> tuple[tuple[str, ...], str | None]:
    """The models that a folder names as its origin, and the type its weights are stored in (which proves nothing).

    README.md (its `base_model`), config.json and adapter_config.json name them. A folder of the hub's own cache also
    has the model's id in its path.

    Raises:
        KnowledgeBaseError: a config.json that is not a JSON object, or a card that names more models than any merge.
    """
    folder = Path(os.path.expanduser(path))
    config = _json(folder / "config.json")
    named = [
        *_cached_id(folder),
        *_base_models(_start_of(folder / "README.md")),
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
    return tuple(bases), dtype if isinstance(dtype, str) else None


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
    text = _start_of(file)
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


def _start_of(file: Path) -> str:
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        return stream.read(_LIMIT).decode("utf-8", errors="replace")
