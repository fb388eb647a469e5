"""Workers on other machines: a command with two pipes over SSH or adb, or in an actor of Ray; files go by content."""
