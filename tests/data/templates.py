"""Chat templates written for the tests, each imitating one family's habits."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Trims every content; the turn's end is followed by nothing.
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# No generation prompt at all; a blank before the answer and EOS after it.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)

# Renames the role, folds the system text into the first user turn, insists on alternation.
GEMMA = (
    "{{ '<bos>' }}{% if messages[0].role == 'system' %}{% set head = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ (head if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# Removes the thinking of turns before the last user turn; writes a thinking block, perhaps empty, after it.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thought = '' %}"
    "{% if m.reasoning_content is defined %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ content }}"
    "{% if m.tool_calls is defined %}{% for call in m.tool_calls %}"
    "{% if content or not loop.first %}{{ '\n' }}{% endif %}{{ '<tool_call>' + call | tojson + '</tool_call>' }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Its generation prompt opens a thinking block; turns of the past have none.
THINKING_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last and '<think>' not in m.content %}"
    "{{ '<think>\n\n</think>\n' }}{% endif %}"
    "{{ (m.content if loop.last else m.content.split('</think>')[-1]) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

# Two special tokens end a turn, directly one after the other; the next turn begins with a third.
TWO_ENDS = (
    "{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + m.content + '<|eot_id|><end_of_turn>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>assistant\n' }}{% endif %}"
)

# Writes a tool's answer into the calling turn, so a turn without its calls renders otherwise.
INLINE_TOOLS = (
    "{% for m in messages %}{% if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.tool_calls is defined %}"
    "{{ 'CALL ' + m.tool_calls | tojson + messages[loop.index0 + 1].content }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Marks what the assistant writes.
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Plain words and no special token anywhere.
WORDS = (
    "{% for m in messages %}{{ ('Human: ' if m.role == 'user' else 'Bot: ') + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Bot:' }}{% endif %}"
)
