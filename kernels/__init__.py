"""One op a folder: kernel, launcher and torch reference. Kept free of torch and triton imports."""
