import pytest

from segue.toolcalls import format_of

QWEN_25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {{- "For each function call, return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n
         {\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- endif %}"""
QWEN_3_CODER = """{%- if tools is iterable and tools | length > 0 %}
    {{- '\\n\\nIf you choose to call a function ONLY reply in the following format:\\n\\n<tool_call>\\n
         <function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n
         </function>\\n</tool_call>' }}
{%- endif %}"""
LLAMA_31 = """{%- if builtin_tools is defined or tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{{- "<|python_tag|>" + tool_call.name + ".call(" }}"""
LLAMA_32 = """{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}"""
MISTRAL = """{%- if tools is not none and (message == user_messages[-1]) %}
    {{- "[AVAILABLE_TOOLS] [" }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- "][/AVAILABLE_TOOLS]" }}
{%- elif message.tool_calls is defined %}{{- "[TOOL_CALLS] [" }}{%- endif %}"""
GLM = """{%- if tools -%}<tool_call>{function-name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>
</tool_call>{%- endif -%}"""
PHI = "{% if tools %}<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}"
CHATML = "{% for message in messages %}<|im_start|>{{ message.role }}\\n{{ message.content }}<|im_end|>\\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (QWEN_25, "hermes"),
        (QWEN_3_CODER, "qwen-coder"),
        (LLAMA_31, "llama"),
        (LLAMA_32, "llama"),
        (MISTRAL, "mistral"),
        (GLM, None),
        (PHI, None),
        (CHATML, None),
        ("", None),
    ],
)
def test_a_template_tells_the_format_that_its_model_writes(template, format):
    assert format_of(template) == format
