"""A tokenizer as a GGUF file has it: GPT-2's and Llama 3's byte-level BPE, and Llama's BPE that falls back to bytes.

Source: llama.cpp, conversion/base.py (tokens and their types), src/llama-vocab.cpp (what it does with each kind).
gguf-py reads merges, special tokens and the chat template.
"""

import json
import re
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from halfstep.errors import LayoutError, MissingLibraryError


with MissingLibraryError.of("export"):
    import gguf


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""What Llama 3's tokenizer cuts text by."""
_BYTES = {"type": "ByteLevel", "add_prefix_space": False}
_CUTS = {
    "gpt-2": ([_BYTES | {"use_regex": True}], False),
    "llama-bpe": (
        [
            {"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False},
            _BYTES | {"use_regex": False},
        ],
        True,
    ),
}
"""By llama.cpp's name: how text is cut before bytes are merged, and whether words that are tokens are not merged."""
_OUT = "leave the tokenizer out (--no-tokenizer), and the file takes and gives token numbers"
_SPACE = "\u2581"
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> str:
    """Write tokens, merges or scores, special tokens and the chat template; returns llama.cpp's name of the kind.

    Args:
        size: how many tokens the model has; unused ones are added where the tokenizer has fewer.

    Raises:
        LayoutError: the folder holds none, one that llama.cpp would not follow, or one of more tokens than the model.
    """
    tokenizer = _read(folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    said = {"model": {}} if backend is None else json.loads(backend.to_str())
    kind, named, vocabulary = _kind(said, folder), tokenizer.added_tokens_decoder, tokenizer.get_vocab()
    tokens, is_llama = {number: token for token, number in vocabulary.items()}, kind == "llama"
    if (count := max(tokens) + 1) > size:
        raise LayoutError(f"{folder}: a tokenizer of {count} tokens for a model of {size}; give the model's own")
    scores = _scores(said["model"]["merges"], vocabulary, named, folder) if is_llama else {}
    start, end = _ends(tokenizer, folder)
    writer.add_tokenizer_model("llama" if is_llama else "gpt2")
    writer.add_tokenizer_pre("default" if is_llama else kind)
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(size)])
    unknown = tokenizer.unk_token if is_llama else None
    writer.add_token_types([_type(tokens.get(n), named.get(n), unknown, is_llama) for n in range(size)])
    if is_llama:
        writer.add_token_scores([scores.get(number, 0.0) for number in range(size)])
        writer.add_add_space_prefix(bool(_prefixed(said)))
    special = gguf.SpecialVocab(folder, load_merges=not is_llama, n_vocab=size)
    special.add_special_token |= {"bos": start, "eos": end}
    special.add_to_gguf(writer, quiet=True)
    return kind


def _read(folder: Path) -> Any:
    load = import_module("transformers").AutoTokenizer.from_pretrained
    try:
        return load(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise LayoutError(
            f"{folder}: no tokenizer can be read ({type(error).__name__}: {why}). Name its folder, or {_OUT}"
        ) from error


def _kind(said: dict[str, Any], folder: Path) -> str:
    """`llama`, or the name of a byte-level BPE's way to cut text."""
    model, cuts = said["model"], said.get("pre_tokenizer") or {}
    changed = any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    parts, kept = cuts.get("pretokenizers", [cuts]), bool(model.get("ignore_merges"))
    if model.get("type") == "BPE" and not changed:
        if model.get("byte_fallback") and not kept and _prefixed(said) is not None:
            return "llama"
        plain = not model.get("byte_fallback") and not said.get("normalizer")
        for kind, (own, wanted) in _CUTS.items():
            if plain and kept == wanted and _are(parts, own):
                return kind
    found = ", ".join(part.get("type", "nothing") for part in parts)
    raise LayoutError(
        f"{folder}: a tokenizer of type {model.get('type', 'unknown')} that cuts text by {found}; expected "
        "GPT-2's or Llama 3's byte-level BPE, or Llama's with byte_fallback, which llama.cpp follows. To "
        f"export without, {_OUT}"
    )


def _are(parts: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return len(parts) == len(expected) and all(
        part.get(key) == value for part, own in zip(parts, expected, strict=True) for key, value in own.items()
    )


def _prefixed(said: dict[str, Any]) -> bool | None:
    """Whether a text begins with a space for a tokenizer whose spaces are tokens' parts; None for another one."""
    normal, cuts = said.get("normalizer"), said.get("pre_tokenizer")
    if normal is None and cuts and _are([cuts], [{"type": "Metaspace", "replacement": _SPACE, "split": False}]):
        return bool(cuts["prepend_scheme"] != "never")
    steps = (normal or {}).get("normalizers", [normal or {}])
    if cuts is None and _are(steps[-1:], [_SPACES]):
        before = steps[:-1]
        return bool(before) if not before or _are(before, [{"type": "Prepend", "prepend": _SPACE}]) else None
    return None


def _scores(
    merges: list[list[str]], vocabulary: dict[str, int], named: dict[int, Any], folder: Path
) -> dict[int, float]:
    """The scores by which llama.cpp merges any two neighbours that are a token together, the highest first, as those
    merges do in their order."""
    pairs = {tuple(pair) for pair in merges}
    order = [token for token, _ in groupby("".join(pair) for pair in merges)]
    plain = (token for token, number in vocabulary.items() if number not in named and not _is_byte(token))
    cuts = ((token[:i], token[i:]) for token in plain for i in range(1, len(token)))
    lost = next((pair for pair in cuts if pair not in pairs and {*pair} <= vocabulary.keys()), None)
    if lost is not None or len({*order}) < len(order):
        why = "merges of a token are apart" if lost is None else f"no merge joins {lost[0]!r} and {lost[1]!r}"
        raise LayoutError(
            f"{folder}: {why}, and llama.cpp joins any two neighbours that are a token, by scores of tokens: it would "
            f"tokenize otherwise. To export without, {_OUT}"
        )
    return {vocabulary[token]: -float(rank) for rank, token in enumerate(order)}


def _is_byte(token: str) -> bool:
    return re.fullmatch("<0x[0-9A-F]{2}>", token) is not None


def _type(token: str | None, named: Any, unknown: str | None, is_llama: bool) -> int:
    """GGUF's type of a token, None for one that the tokenizer has not; `named` is how it was added to it."""
    if token is None:
        return gguf.TokenType.UNUSED
    if token == unknown:
        return gguf.TokenType.UNKNOWN
    if named is not None:
        return gguf.TokenType.CONTROL if named.special else gguf.TokenType.USER_DEFINED
    return gguf.TokenType.BYTE if is_llama and _is_byte(token) else gguf.TokenType.NORMAL


def _ends(tokenizer: Any, folder: Path) -> tuple[bool, bool]:
    """Whether a text begins with the token of its beginning, and ends with that of its end."""
    inner, whole = (tokenizer("a", add_special_tokens=given)["input_ids"] for given in (False, True))
    for start, end in ((False, False), (True, False), (False, True), (True, True)):
        if [tokenizer.bos_token_id] * start + inner + [tokenizer.eos_token_id] * end == whole:
            return start, end
    raise LayoutError(
        f"{folder}: a text gets other tokens than one at its beginning and one at its end: {whole} of {inner}. "
        f"To export without, {_OUT}"
    )
