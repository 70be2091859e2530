"""The support vector regression itself: many at once as tensors, solvers, the certificate of a solution, gradients."""
