"""Calibration: samples of inputs, ranges and scales of tensors, rounding of weights."""
