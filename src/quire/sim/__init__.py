"""The simulation of `quire simulate`: the engine's scheduler, page pool and prefix cache, with computed step times.

    trace        requests: recorded (Azure, Mooncake, ShareGPT) or generated
    shapes       generated traffic in the shape of recorded traces
    analytic     GPUs by name, and step times from their data      measured   step times from a file of `quire bench steps`
    replica      one engine in virtual time              tiers      copies of pages to host memory and disk
    fleet        replicas, routers and arrivals in virtual time; the fewest replicas that meet objectives
    figures      rates, latencies and cache usage of a run
    page         the report with plots

Nothing here waits, imports torch or loads a model. All decisions are those of `sched/` and `cache/`; only the step times
are models.
"""
