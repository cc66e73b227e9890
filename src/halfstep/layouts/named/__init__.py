"""The layouts, in files by who defined them."""
