"""The machine room: kernels, how they are launched, and the library's kernels where these are the faster ones."""
