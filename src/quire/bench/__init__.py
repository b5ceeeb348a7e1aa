"""Measuring servers and models: load, timings, reports.

    serve ...    a load client for any OpenAI server: HTTP, the protocol, arrivals, metrics
    offline      a model in this process, or in new ones: throughput, latency, start-up
    machine      hardware and versions, for results
    steps        single steps, for simulations                       front_end   the API process, for simulations

The package imports no engine and no torch: servers are reached by HTTP, and a model is any object that can generate.

"""
