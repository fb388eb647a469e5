"""Samples to ranges to scales."""
