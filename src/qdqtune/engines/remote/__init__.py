"""Workers on other machines: a command with two pipes over SSH, or in an actor of Ray; files go by content."""
