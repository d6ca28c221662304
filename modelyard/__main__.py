"""`python -m modelyard` is the command `modelyard`."""

from modelyard.cli import main

if __name__ == "__main__":
    main()
