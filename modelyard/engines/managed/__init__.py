"""Shared by engines that start a server as a child process and forward to it."""
