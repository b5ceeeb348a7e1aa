"""Measuring servers: load, timings, reports.

This room knows HTTP, the OpenAI protocol and arithmetic; it imports no engine and no torch, and nothing of Quire but
`types`, so that it measures any OpenAI server the same way.
"""
