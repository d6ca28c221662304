"""Parse any model's raw output into reasoning, text and tool calls: incremental, without I/O, and no marker leaks."""

from modelyard.core.tokenizer import Piece
from modelyard.scanner.parse_output import ParsedCall, ParsedOutput, parse
from modelyard.scanner.scanner import Scanner

__all__ = ["ParsedCall", "ParsedOutput", "Piece", "Scanner", "parse"]
