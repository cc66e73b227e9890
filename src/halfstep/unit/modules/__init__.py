"""Modules for unit-scaled models, with the names, arguments and state-dict keys of torch's layers."""
