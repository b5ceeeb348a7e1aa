"""Linear methods for weights that stay quantized: one file per scheme."""
