"""Encoders of images and videos, by family (`MediaFamily.tower`)."""
