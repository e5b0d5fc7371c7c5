"""Plain PyTorch twins of the kernels: same names, same signatures, no speed."""
