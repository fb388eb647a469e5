"""`python -m qdqtune` is `qdqtune`."""

from qdqtune.cli.main import main

main()
