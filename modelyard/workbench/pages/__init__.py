"""The pages of the workbench, one module per page."""
