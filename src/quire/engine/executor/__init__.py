"""Ways to run a StepPlan: in this process (`local`), or without any model (`fake`)."""
