"""From a model's answer, as its text comes, to plain content and tool calls.

    text ──push──▶ CallReader ──▶ "content", ToolCall(name, arguments), "content", …

Whitespace that touches a complete call, before it or after it, is dropped; every other character of the answer comes
out, as content or inside a call. What only looked like a call is content.
"""

from segue.toolcalls.calls import Piece, ToolCall
from segue.toolcalls.readers import FORMATS, CallReader, reader
from segue.toolcalls.templates import format_of

__all__ = ["FORMATS", "CallReader", "Piece", "ToolCall", "format_of", "reader"]
