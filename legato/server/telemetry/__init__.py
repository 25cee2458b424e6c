"""What is counted and traced of requests, tokens and drafts, and the names that tools know it by."""
