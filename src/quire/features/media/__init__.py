"""Images and videos in prompts.

types/media.py   MediaItem: a range of prompt tokens, the item's digest and its preprocessed arrays
families/        per architecture: placeholder text, preprocessing, expansion into prompt tokens (torch-free)
towers/          per architecture: the encoder, from preprocessed arrays to embeddings of the language model's size
"""
