"""The TensorRT family: the Python API, trtexec, and TensorRT-RTX without a GPU."""
