"""What the bits of values say: what they hold, where they came from, what a cast would do to them. No files."""
