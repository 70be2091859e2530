"""The shared battery: every mechanism × executor × mask × shape. Adding a mechanism adds a line to `PRIMALS`."""
