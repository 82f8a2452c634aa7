"""Which format a model writes its calls in, told by the chat template that shows it the tools."""

from __future__ import annotations


def format_of(chat_template: str) -> str | None:
    """None if the template has no tools, or has them in a format that is not known here.

    The most telling mark first: templates for coder models also have `<tool_call>`, Llama's have few marks of their own.
    """
    if "tools" not in chat_template:
        return None
    if "<function=" in chat_template:
        return "qwen-coder"
    if "<tool_call>" in chat_template:
        # GLM writes <arg_key> and <arg_value> between the same tags.
        return None if "<arg_key>" in chat_template else "hermes"
    if "[TOOL_CALLS]" in chat_template or "[AVAILABLE_TOOLS]" in chat_template:
        return "mistral"
    if "<|python_tag|>" in chat_template or ('"parameters"' in chat_template and "ipython" in chat_template):
        return "llama"
    return None
