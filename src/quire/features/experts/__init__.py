"""Mixture-of-experts layers that are balanced over ranks or shared between engines."""
