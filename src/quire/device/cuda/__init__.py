"""A CUDA GPU, by torch and Triton."""
