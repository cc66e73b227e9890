"""One file a kind of checkpoint: each says whether it knows a path, and opens it."""
