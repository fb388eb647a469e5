"""`python -m qdqtune.autotune.region_inspect --model M` is `qdqtune inspect M`."""

from qdqtune.autotune.__main__ import inspect

if __name__ == "__main__":
    inspect("region_inspect")
