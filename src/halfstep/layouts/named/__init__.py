"""The layouts, in files by whoever defined them."""
