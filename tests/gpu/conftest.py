"""Scripts that other tests run under Triton in their own processes are not collected."""

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
