"""The workbench: a web page on the server's own port that drives it through the admin API, as any client may."""
