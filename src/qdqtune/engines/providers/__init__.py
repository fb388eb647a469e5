"""A file for each execution provider of ONNX Runtime, with its table as the value `PROVIDER`; see `provider_table`."""
