"""Exact, slow, independent answers that the library's are compared with. Nothing here calls halfstep's arithmetic."""
