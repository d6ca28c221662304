"""What engines share that forward to another server: jobs, an HTTP client, its faults as our errors, second tries."""
