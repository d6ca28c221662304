"""Model files on this machine: finding, fetching, converting and registering them."""
