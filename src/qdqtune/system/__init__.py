"""Files that a command may write, temporary folders, and Python processes."""
