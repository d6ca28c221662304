"""The three systems that Modelyard replaces: their documented configurations, requests and tables, one test per row."""
