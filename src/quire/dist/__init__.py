"""Several ranks that run one model together: where each stands, and what they say to each other. Knows tensors, no layers."""
