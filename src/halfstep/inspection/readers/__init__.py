"""One file per kind of checkpoint: each recognises paths of its kind, and opens them."""
