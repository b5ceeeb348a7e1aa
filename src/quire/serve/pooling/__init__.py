"""The HTTP endpoints of pooling models: embeddings, reranking, scoring, classification.

protocol.py   request and response bodies        work.py      texts to prompts, prompts to the engine's results
routes.py     which endpoints a model answers    embed.py, score.py, classify.py: the endpoints
"""
