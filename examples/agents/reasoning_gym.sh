#!/usr/bin/env bash
# GRPO on a task of reasoning-gym (pip install reasoning-gym): one turn, judged by the task itself.
#
#   DATASET=chain_sum examples/agents/reasoning_gym.sh [more options of trimtab grpo]

DATASET=${DATASET:-chain_sum}
SAVE_PATH=${SAVE_PATH:-./checkpoint/reasoning-gym}
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train --environment "rg:$DATASET" --max_turns 1
