"""Optimizers that store weights, master weights and moments in few bits, and the loss scaler."""

from halfstep.optim.checks import check_moments, check_optimizer
from halfstep.optim.classes import Combined, Lamb, Lion
from halfstep.optim.conversion import convert
from halfstep.optim.graphed import GraphedStep, PerLayer
from halfstep.optim.loss_scale import LossScaler
from halfstep.optim.lowbit import LowBit
from halfstep.optim.lowbit_classes import AdamW8bit, AdamWFp8, CoatAdamW, GaLoreAdamW, GaLoreAdamW8bit, LowBitAdamW
from halfstep.optim.rules import rule_of, update_rules
from halfstep.optim.update import Update


__all__ = [
    "AdamW8bit",
    "AdamWFp8",
    "CoatAdamW",
    "Combined",
    "GaLoreAdamW",
    "GaLoreAdamW8bit",
    "GraphedStep",
    "Lamb",
    "Lion",
    "LossScaler",
    "LowBit",
    "LowBitAdamW",
    "PerLayer",
    "Update",
    "check_moments",
    "check_optimizer",
    "convert",
    "rule_of",
    "update_rules",
]
