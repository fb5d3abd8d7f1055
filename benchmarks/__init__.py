"""Measurements of the exchange against its floor and against other libraries."""
