"""Optimizers that store weights, masters and moments in few bits, and the loss scale."""

from halfstep.optim.loss_scale import LossScaler
from halfstep.optim.lowbit import LowBit, convert
from halfstep.optim.rules import rule_of, update_rules


__all__ = ["LossScaler", "LowBit", "convert", "rule_of", "update_rules"]
