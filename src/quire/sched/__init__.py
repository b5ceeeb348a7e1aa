"""Who runs next, with which pages: a pure state machine, no torch, no I/O, no clock of its own.

    scheduler     add, schedule, abort: the rules
    results       commit, fail: what became of a step
    roster        where every request is, and how it moves
    queue         the order of the waiting and of the running
    forks         children that wait for their parent's pages, finished requests that keep theirs
    limits        how long a request and a row may be, and who is refused
    plan_builder  lists → one StepPlan
    stop          when a request is finished

This room does not know models, devices, text or sockets: what it decides leaves as a StepPlan, what it learns comes as a
StepResult.
"""
