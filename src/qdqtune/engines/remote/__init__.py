"""Workers on other machines: files by content, requests and answers; over SSH or adb, or on a Ray cluster."""
