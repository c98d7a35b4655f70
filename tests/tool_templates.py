"""Chat templates with tools, of the shapes that Qwen2.5, Hermes and Llama 3.1 have, and models with them."""

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

PLAIN = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nReturn <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Hermes models keep it beside a default that knows no tools, and write the descriptions themselves.
HERMES_TOOL_USE = """\
{%- macro members(parameters) %}
    {%- for name, member in parameters.properties.items() %}
        {{- name + ': ' + member.type }}{{- ', ' if not loop.last }}
    {%- endfor %}
{%- endmacro %}
{{- '<|im_start|>system\\nYou are a function calling AI model. <tools>' }}
{%- for tool in tools %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- tool.name + '(' + members(tool.parameters) + ') - ' + tool.description }}
    {{- '\\n' if not loop.last }}
{%- endfor %}
{{- '</tools> Answer with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' and message.tool_calls is defined %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA = """\
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' and tools is not none and loop.first %}
        {{- '<|im_start|>user\\n\\nGiven these functions, respond with JSON for a call of one of them. ' }}
        {{- 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.\\n\\n' }}
        {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
        {{- message.content + '<|im_end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}
        {{- '}<|im_end|>' }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|im_start|>ipython\\n\\n' }}{{- message.content | tojson }}{{- '<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n\\n' + message.content | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""

HERMES: list[dict[str, str]] = [
    {"name": "default", "template": PLAIN},
    {"name": "tool_use", "template": HERMES_TOOL_USE},
]

WEATHER: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "How it is <outside>, now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME: dict[str, object] = {"type": "function", "function": {"name": "get_time", "description": "The time."}}


def with_template(model: Path, folder: Path, template: str | list[dict[str, str]]) -> Path:
    """The tokenizer files of a model with another template, and <|python_tag|> as a special token."""
    folder.mkdir()
    for name in ("tokenizer_config.json", "config.json"):
        shutil.copy(model / name, folder)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|python_tag|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _change(folder / "tokenizer_config.json", chat_template=template)
    _change(folder / "config.json", vocab_size=tokenizer.get_vocab_size())
    return folder


def _change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
