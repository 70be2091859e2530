"""Outputs times the sigmoid of what a layer makes of its input."""
