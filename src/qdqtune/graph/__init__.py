"""Reads, queries, rewrites and saves ONNX models, each as one immutable value; knows nothing of quantization."""
