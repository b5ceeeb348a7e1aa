"""Behind `quire simulate`: the engine's own scheduler, page pool and prefix cache, on devices that are only arithmetic.

    trace        who asks when: recorded (Azure, Mooncake, ShareGPT) or generated
    shapes       what makes a step long           cards        GPUs by their names
    analytic     step times from a card's numbers   measured     and from a file of `quire bench steps`
    replica      one engine in virtual time       router       which replica gets a request
    fleet        replicas and arrivals, in the order of time
    figures      what came of it                  objectives   how few replicas keep what is promised
    plots, page  the report

Nothing here waits, knows torch or loads a model. What is decided, is decided by `sched/` and `cache/`; only how long steps
take is made up.
"""
