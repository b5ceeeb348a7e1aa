"""The books of the paged cache: which page holds what, who uses it, and what may be found again.

    layout    layer specs → groups of layers that share a page table
    capacity  bytes → pages, and the pages one request can need at most
    prefix    tokens → chained content keys
    pool      pages, reference counts, the content index, eviction
    groups    one kind of page table each (full, sliding window)
    tables    all groups of a request together: what the scheduler talks to

This room knows page numbers and token ids. It does not know torch, bytes on a device, steps, budgets or who is waiting.
"""
