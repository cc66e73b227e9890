"""The bytes of a training setup, by role, before it exists: a recipe is run on tensors without memory."""
