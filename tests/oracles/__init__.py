"""Exact, slow, independent reference implementations. Nothing in this folder calls halfstep's arithmetic."""
