"""An ONNX file as one immutable value: read, queried, rewritten, saved; nothing of quantization."""
