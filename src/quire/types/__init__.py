"""Value types that cross room borders.

This room knows nothing of torch, files, sockets or threads: every other room may import it, it imports none of them.
"""
