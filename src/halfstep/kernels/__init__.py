"""Fast paths. Each file offers `supports(...)` and `run(...)`, equal bit for bit to the reference it replaces."""
