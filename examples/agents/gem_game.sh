#!/usr/bin/env bash
# GRPO on a game of GEM (pip install gem-llm): a number is to be guessed. A turn is worth what comes from it on.
#
#   GAME=game:GuessTheNumber-v0-easy examples/agents/gem_game.sh [more options of trimtab grpo]

GAME=${GAME:-game:GuessTheNumber-v0-easy}
SAVE_PATH=${SAVE_PATH:-./checkpoint/gem}
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train --environment "gem:$GAME" --max_turns 12 --turn_reward returns
