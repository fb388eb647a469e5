"""`python -m qdqtune` is `qdqtune`."""

from qdqtune.cli import main

main()
