"""Small tokenizers of the kinds that GGUF files hold, trained on Python's standard library."""

import json
import sysconfig
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast


KINDS = ("gpt-2", "llama-bpe", "llama")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def texts():
    """The sources of ten modules of Python's standard library."""
    return [path.read_text() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:10]]


@cache
def trained(kind):
    """A trained tokenizer of the package tokenizers."""
    named = {"gpt-2": ["<|endoftext|>"], "llama-bpe": ["<|begin|>", "<|end|>"], "llama": ["<unk>", "<s>", "</s>"]}[kind]
    made, options = Tokenizer(models.BPE(byte_fallback=kind == "llama")), {"show_progress": False}
    if kind == "llama":
        named += [f"<0x{byte:02X}>" for byte in range(256)]
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "llama-bpe":
        cut = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([cut, bytewise])
    made.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=600, special_tokens=named, **options))
    return made


def made_tokenizer(kind, folder):
    """A tokenizer of this kind, saved to `folder`, as transformers' class."""
    made = trained(kind)
    vocabulary, mine = made.get_vocab(), AddedToken("<mine>", normalized=False)
    if kind == "llama-bpe":
        made = Tokenizer.from_str(made.to_str().replace('"ignore_merges":false', '"ignore_merges":true'))
        made.decoder = decoders.ByteLevel()
        start = vocabulary["<|begin|>"]
        made.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", start)])
        found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|begin|>", eos_token="<|end|>")
    elif kind == "gpt-2":
        merges = [tuple(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
        found = GPT2Tokenizer(vocab=vocabulary, merges=merges)
    else:  # as transformers reads SentencePiece files: all pairs whose concatenation is a token, in the order of tokens
        plain = sorted((token for token in vocabulary if not token.startswith("<")), key=vocabulary.get)
        cuts = [(token[:i], token[i:]) for token in plain for i in range(1, len(token))]
        found = LlamaTokenizer(vocab=vocabulary, merges=[pair for pair in cuts if {*pair} <= vocabulary.keys()])
        found.add_bos_token = True
    found.add_tokens([mine])
    found.chat_template = TEMPLATE
    found.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)
