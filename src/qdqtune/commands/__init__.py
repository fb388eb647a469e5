"""The commands of the command line as functions: tune, quantize, compare, apply, check, build, doctor and others."""
