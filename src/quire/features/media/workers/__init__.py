"""Fetching, decoding and preprocessing of images and videos, in processes of their own.

`wire` has the jobs, `worker` is the process, `fetch`, `images` and `videos` do the work.
"""
