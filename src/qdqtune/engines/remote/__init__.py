"""Workers on other machines: files by content, requests and answers; over SSH, or on a Ray cluster."""
