"""The workbench: a web page on the server's port that uses the admin API and the public protocols like any client."""
