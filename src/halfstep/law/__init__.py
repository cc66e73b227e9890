"""Scaling laws for precision: the loss from parameters, tokens and bits; published constants and fits. No torch."""

from halfstep.law.fit import Cell, Damage, Fitted, fit_damage, fit_loss
from halfstep.law.precision import KUMAR, PARTS, Law, PostTraining, Width


__all__ = ["KUMAR", "PARTS", "Cell", "Damage", "Fitted", "Law", "PostTraining", "Width", "fit_damage", "fit_loss"]
