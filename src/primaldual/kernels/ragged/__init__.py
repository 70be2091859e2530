"""Fused attention of heads with different numbers of keys, in one launch, and the passes over memory around it."""
