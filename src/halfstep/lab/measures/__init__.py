"""The metrics of the fields, each a function on plain tensors or lists."""
