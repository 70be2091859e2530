"""Depth-wise convolutions along the tokens, and the gradients of their taps."""
