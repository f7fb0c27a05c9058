"""Chat templates by name, for models that bring none: `--chat-template NAME`.

Each lays out a conversation the way that family was trained; none of them knows tools.
"""

from __future__ import annotations

_SYSTEM_FIRST = """\
{%- set has_system = messages and messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] | trim if has_system else '' -%}
{%- set turns = messages[1:] if has_system else messages -%}
"""

_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

_LLAMA2 = (
    _SYSTEM_FIRST
    + """\
{%- for message in turns -%}
{%- if message['role'] == 'assistant' -%}
{{ ' ' + message['content'] | trim + ' ' + eos_token }}
{%- else -%}
{{ bos_token if not loop.first else '' }}{{ '[INST] ' }}
{%- if loop.first and system -%}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{%- endif -%}
{{ message['content'] | trim + ' [/INST]' }}
{%- endif -%}
{%- endfor -%}
"""
)

_LLAMA3 = """\
{%- for message in messages -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}
"""

_MISTRAL = (
    _SYSTEM_FIRST
    + """\
{%- for message in turns -%}
{%- if message['role'] == 'assistant' -%}
{{ ' ' + message['content'] | trim + eos_token }}
{%- else -%}
{{ '[INST] ' + (system + '\\n\\n' if loop.first and system else '') }}
{{- message['content'] + '[/INST]' }}
{%- endif -%}
{%- endfor -%}
"""
)

_GEMMA = (
    _SYSTEM_FIRST
    + """\
{%- for message in turns -%}
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n' }}
{{- system + '\\n\\n' if loop.first and system else '' }}
{{- message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
)

_PHI3 = """\
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""

_ZEPHYR = """\
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|endoftext|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""

_CHATGLM4 = """\
[gMASK]<sop>
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>\\n' + message['content'] }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""

_DEEPSEEK3 = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' -%}
{{ '<\uff5cAssistant\uff5c>' + message['content'] + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
{%- else -%}{{ '<\uff5cUser\uff5c>' + message['content'] }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<\uff5cAssistant\uff5c>' }}{%- endif -%}
"""

_VICUNA = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' -%}{{ 'ASSISTANT: ' + message['content'] + '</s>\\n' }}
{%- else -%}{{ 'USER: ' + message['content'] + '\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""

BUILTIN_TEMPLATES: dict[str, str] = {
    "chatglm4": _CHATGLM4,
    "chatml": _CHATML,
    "deepseek3": _DEEPSEEK3,
    "gemma": _GEMMA,
    "llama2": _LLAMA2,
    "llama3": _LLAMA3,
    "mistral-v3": _MISTRAL,
    "phi3": _PHI3,
    "vicuna": _VICUNA,
    "zephyr": _ZEPHYR,
}
