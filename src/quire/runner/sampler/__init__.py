"""From logits to tokens: a pipeline of stages (`edits`, `filters`, `sample`).

    raw logprobs → allowed ids → bad words → min_tokens → logit_bias → penalties → temperature → min_p → top-k, top-p → sample

A stage keeps its state in arrays indexed by slot and is skipped when no row of the step uses it. On a GPU everything from
temperature to sample is one operation (`ops/sample.py`) that recorded steps contain; a new filter (`FILTERS` in `pipeline.py`,
between temperature and min_p) runs before it, for the rows that use it. The sampler knows nothing of models, pages
or requests.
"""
