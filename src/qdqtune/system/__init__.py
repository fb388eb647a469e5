"""What the operating system holds: files that a command may write, temporary folders, Python processes."""
