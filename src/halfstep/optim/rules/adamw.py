"""AdamW: Adam whose weight decay is applied to the weight, not added to the gradient."""

import torch

from halfstep.optim.rules.adam import adam_rule


adamw = adam_rule("adamw", torch.optim.AdamW, decoupled=True)
