"""How to search, a file a mode: what it prepares before the search, and what it knows after it."""
