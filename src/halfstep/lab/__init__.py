"""Train models under several recipes and report what each costs and breaks."""
