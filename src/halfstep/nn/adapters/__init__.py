"""One file for each kind of layer that follows a recipe, other than by torch.autocast."""
