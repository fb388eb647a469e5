"""The other verbs as functions: quantize, compare, apply, check, build, doctor."""
