"""Steps on the device: slots, batches, memory, CUDA graphs and the sampler.

The runner knows slots, positions and pages. It does not know request ids, text, the scheduler, or why a row is in a plan.
"""
