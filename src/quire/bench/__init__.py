"""Measuring servers and models: load, timings, reports.

    serve ...    a load client for any OpenAI server: HTTP, the protocol, arrivals, metrics
    offline      a model in this process: throughput and latency        workloads   the named ones
    startup      new processes, until their first token                 machine     where figures come from
    steps        single steps, for simulations

This room imports no engine and no torch, and nothing of Quire but `types`: servers are reached by HTTP, and a model is
whatever can generate.
"""
