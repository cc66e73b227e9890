"""Evidence in the bits of values: formats that hold them, their origin, what a cast would do to them. No files."""
