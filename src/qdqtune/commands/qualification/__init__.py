"""`qdqtune doctor --qualify`: checks what qdqtune claims of an engine on the machine at hand."""
