"""`python -m qdqtune.autotune.region_search` is `region_inspect`: one division serves both."""

from qdqtune.autotune.region_inspect import main

if __name__ == "__main__":
    main(name="qdqtune.autotune.region_search")
