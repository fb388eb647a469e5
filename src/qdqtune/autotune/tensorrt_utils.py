"""The benchmarks, in the module where scripts for subgraph mode look for them."""

from qdqtune.autotune.benchmark import Benchmark, TensorRTPyBenchmark, TrtExecBenchmark

__all__ = ["Benchmark", "TensorRTPyBenchmark", "TrtExecBenchmark"]
