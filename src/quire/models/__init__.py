"""Model families: mathematics only.

A family file says how its blocks are made and how its checkpoints name things. Where weights come from, where the cache
lies and which kernel runs are not known here.
"""
