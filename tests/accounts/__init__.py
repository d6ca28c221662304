"""Tests of modelyard.accounts."""
