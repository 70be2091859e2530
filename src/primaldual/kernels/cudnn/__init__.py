"""cuDNN's attention: when it can be taken, and what is done around it."""
