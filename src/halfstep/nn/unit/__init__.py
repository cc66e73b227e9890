"""Unit scaling of an existing model, in place."""
