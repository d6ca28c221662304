"""The pages of the workbench, one file each: what it shows, and what can be done there."""
