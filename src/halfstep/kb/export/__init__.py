"""The knowledge base as JSON, CSV, Markdown, or one HTML page."""
