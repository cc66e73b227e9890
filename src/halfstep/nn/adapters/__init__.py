"""Adapters: one file for each kind of layer that follows a recipe by a forward of its own, not by autocast alone."""
