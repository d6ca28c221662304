"""What engines share that start a server of their own, watch it and forward to it."""
