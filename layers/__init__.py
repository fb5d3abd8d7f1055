"""Attention layers that run on whole sequences for a subset of the heads."""
