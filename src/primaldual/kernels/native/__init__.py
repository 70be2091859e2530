"""The compiled part: launches, products and cuDNN calls replayed in C++, with less work for the host."""
