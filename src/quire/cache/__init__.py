"""Bookkeeping of the paged KV cache: the content of each page, its users, and what the prefix cache can find.

    layout    layer specs → groups of layers that share a page table
    snapshots recurrent states of prefixes
    prefix    tokens → chained content keys
    policies  which content is evicted first
    tiers     pages that left the device, in host memory
    pool      pages, reference counts, the content index, eviction
    groups    one kind of page table each (full, sliding window)
    tables    all groups of a request, the interface for the scheduler

The package handles page numbers and token ids: no torch, no device memory, no steps, budgets or queues.
"""
