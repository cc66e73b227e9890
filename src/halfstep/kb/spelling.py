"""Names as people write and derive them: what is the model's, what is its size, and what is a variant of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache


VARIANTS = frozenset(
    {
        "chat", "instruct", "it", "sft", "dpo", "orpo", "rlhf", "preview", "thinking", "zero", "coder", "code", "math",
        "vl", "turbo", "en", "lora", "qlora", "adapter", "peft", "finetuned",
    }
)  # fmt: skip
"""Words of a name that say it was trained on from another model."""

_ENDS = frozenset({"lora", "qlora", "adapter", "peft", "finetuned"})  # what follows these names the data
_SAME = frozenset({"hf", "pt", "meta"})  # the same model in another file
_SIZES = frozenset(
    {"tiny", "xsmall", "mini", "small", "base", "medium", "large", "xlarge", "xl", "xxl", "huge", "giant"}
)
_TOKEN = re.compile(r"\d+x\d+b(?![a-z0-9])|a\d+b(?![a-z0-9])|\d+(?:\.\d+)?[bmtk](?![a-z0-9])|[a-z]+|\d+")
_SIZE = re.compile(r"\d+x\d+b|a?\d+(?:\.\d+)?[bmt]")
_DATE = re.compile(r"\d{4}|\d{6}|\d{8}|\d+k")  # of a release, or the length of its context


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


def derived(one: Spelling, names: Iterable[str]) -> tuple[str, ...]:
    """The names that a spelling is of, or a variant of: with its sizes, or of its whole series where it gives none.

    A series without a number is none where others have one: "llama" may be any of them.
    """
    others = {name: spelling(name) for name in names if "*" not in name}
    if not one.core:
        return ()
    if one.sizes:
        return tuple(name for name, other in others.items() if other.key == one.key)
    length = len(one.core)
    following = {
        other.core[length] for other in others.values() if other.core[:length] == one.core and other.core[length:]
    }
    if not one.numbered and any(word.isdigit() or word == "v" for word in following):
        return ()
    return tuple(name for name, other in others.items() if other.series == one.series)
