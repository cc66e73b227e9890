"""Modules to write unit-scaled models from: torch's layers by name, arguments and state-dict keys, of unit scale."""
