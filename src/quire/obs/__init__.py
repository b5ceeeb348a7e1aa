"""What is seen of a running server: metrics, the periodic line, request logs, traces, and the form of log lines.

Everything here is an observer (`types/stats.py`); it knows no HTTP routes, no engine and no text.
"""
