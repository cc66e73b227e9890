"""Names as people write and derive them: what is the model's, what is its size, and what is a variant of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


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
