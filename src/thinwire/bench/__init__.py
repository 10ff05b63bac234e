"""Measure before training: what codecs do to one model's own tokens."""
