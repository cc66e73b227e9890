"""The named recipes, one a file."""
