"""What is run under triton, in processes of its own, is not collected here."""

collect_ignore = [
    "compiled.py",
    "far.py",
    "interpreted.py",
    "fuzzed.py",
    "fuzzed_rotated.py",
    "fuzzed_tiles.py",
    "native_layers.py",
    "watched.py",
]
