"""What the program says of itself: logs, metrics, and a journal of what happened to each request."""
