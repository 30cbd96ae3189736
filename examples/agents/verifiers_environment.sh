#!/usr/bin/env bash
# GRPO on an environment of verifiers (pip install verifiers): a module with load_environment. It runs as it is; its
# model is the policy, behind an endpoint of this run.
#
#   ENVIRONMENT=reverse_words examples/agents/verifiers_environment.sh [more options of trimtab grpo]

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ENVIRONMENT=${ENVIRONMENT:-reverse_words}
SAVE_PATH=${SAVE_PATH:-./checkpoint/verifiers}
export PYTHONPATH=$HERE${PYTHONPATH:+:$PYTHONPATH} # where reverse_words.py is
source "$HERE/common.sh"

train --environment "verifiers:$ENVIRONMENT"
