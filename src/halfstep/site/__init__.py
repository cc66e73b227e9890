"""One page for a browser: the knowledge base, the number formats, and the memory of a training setup."""
