"""The scheduler: which requests run next, with which pages. A pure state machine: no torch, no I/O, no clock.

    scheduler     add, schedule, abort: the rules
    results       commit or fail a step
    roster        the state of every request and its transitions; forks that wait for their parent
    queue         the order of waiting and running requests
    limits        lengths of requests and rows, admission, stop conditions
    encoding      which images and videos a step encodes, and what the encoder cache holds
    plan_builder  lists → one StepPlan
    budget        the token budget of a step
    balancer      the choice of an engine

The package does not know models, devices, text or sockets: its decisions are StepPlans, its input are StepResults.
"""
