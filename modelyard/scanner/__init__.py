"""Any model's raw output into reasoning, text and tool calls, with zero leakage: pure, piece by piece."""

from modelyard.scanner.parsed import Call, Parsed, parse
from modelyard.scanner.scanner import Scanner

__all__ = ["Call", "Parsed", "Scanner", "parse"]
