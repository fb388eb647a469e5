"""The model value: its index, its constants, and how it is written."""
