"""Rotary positions: queries and keys turned in one launch."""
