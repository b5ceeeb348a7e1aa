"""The executing half's body: slots, batches, memory, the step, and the sampler.

This room knows slots, positions and pages. It does not know request ids, text, the scheduler, or why a row is in a plan.
"""
