"""Bodies, queries and paths that nobody should send: whatever comes, the answer is no 5xx; imports hypothesis."""
