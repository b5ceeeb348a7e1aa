"""Images and videos in prompts. docs/architecture.md describes the path of an image.

API process
    inputs.py      MediaRef: an item of a request, from a part of a message or from `multi_modal_data`
    io_options.py  checks of media_io_kwargs
    reader.py      MediaReader: fetches and preprocesses items in media processes, and completes prompts with them
    requests.py    prompts of `LLM` and `AsyncLLM` with `multi_modal_data`
    store.py       files in shared memory, and the cache of preprocessed items
    prompt.py      Placeholders: replaces placeholders in a prompt by the tokens of items
    workers/       the media processes: fetch, decode, preprocess
    families/      per architecture: placeholder, preprocessing, prompt tokens (torch-free)

engine process (sched/encoding.py schedules the encoder)
    host.py        arguments, limits, memory of the encoder and its cache
    placed.py      PlacedMedia: which tokens of a request are embedded, and their rotary positions
    positions.py   rotary positions with three axes (M-RoPE)
    device.py      MediaPart: what items change in a batch
    encoder.py     Encoder: the cache of embeddings on the device
    towers/        per architecture: the encoder, from preprocessed arrays to embeddings

types/media.py has MediaItem: the range of prompt tokens of an item, its digest and its preprocessed arrays.
"""
