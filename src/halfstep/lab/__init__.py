"""Train models under recipes, side by side, and report what each costs and breaks."""
