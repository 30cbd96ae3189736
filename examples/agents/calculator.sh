#!/usr/bin/env bash
# GRPO with a tool: sums, and a calculator (calculator.py) that may be called before answering.
#
#   examples/agents/calculator.sh [more options of trimtab grpo]
#   TINY=1 examples/agents/calculator.sh

SAVE_PATH=${SAVE_PATH:-./checkpoint/calculator}
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train --agent_func_path "$(dirname "${BASH_SOURCE[0]}")/calculator.py" --max_turns 4
