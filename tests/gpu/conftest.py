"""What is run under triton, in processes of its own, is not collected here."""

collect_ignore = ["compiled.py", "fuzzed.py", "interpreted.py"]
