"""Reports: one self-contained HTML page, and the figures in it."""
