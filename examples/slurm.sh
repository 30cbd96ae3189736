#!/usr/bin/env bash
# A recipe as a Slurm file, written by `trimtab jobs`: torchrun on every machine, or for the recipes on Ray a Ray of the
# job's own with a token of its own. Slurm's warning before the time is over makes the run save; submitted again it goes
# on. The folder from which it is submitted must be one that all machines see.
#
#   NODES=2 examples/slurm.sh train_sft [more options of the recipe]     # torchrun
#   NODES=6 examples/slurm.sh ray_70b                                    # Ray
#   SUBMIT=1 NODES=2 examples/slurm.sh train_dpo                         # and give it to Slurm
#   TINY=1 NODES=1 GPUS=0 examples/slurm.sh ray_hybrid                   # the recipe's tiny mode
#
#   NODES, GPUS, CPUS, TIME, PARTITION, ACCOUNT   of the job; SETUP: a line before it, for instance to load modules
#   JOBS                                          folder of the files (./jobs)

set -euo pipefail

PYTHON=${PYTHON:-python}

# The recipe calls this script again, with its command. Of an option that stands twice the last one counts.
if [[ -n ${IN_RECIPE:-} ]]; then
    command=("$1")
    shift
    while (($#)); do
        option=("$1")
        shift
        while (($#)) && [[ $1 != --[a-zA-Z]* ]]; do option+=("$1") && shift; done
        again=no
        for word in "$@"; do [[ $word == "${option[0]}" ]] && again=yes; done
        [[ $again == yes ]] || command+=("${option[@]}")
    done
    own=(--nodes "${NODES:-1}" --gpus "${GPUS:-8}" --cpus "${CPUS:-16}" --output "${JOBS:-jobs}" --name "$IN_RECIPE")
    own+=(--time "${TIME:-24:00:00}")
    [[ -n ${PARTITION:-} ]] && own+=(--partition "$PARTITION")
    [[ -n ${ACCOUNT:-} ]] && own+=(--account "$ACCOUNT")
    [[ -n ${SETUP:-} ]] && own+=(--setup "$SETUP")
    "$PYTHON" -m trimtab.cli.main jobs "${own[@]}" -- python -m "${command[@]}"
    [[ ${SUBMIT:-0} == 0 ]] || exec sbatch "${JOBS:-jobs}/${IN_RECIPE}_s1.sbatch"
    exit
fi

recipe=${1:?give a recipe, for instance train_sft or ray_70b}
shift
IN_RECIPE=$recipe LAUNCH="bash ${BASH_SOURCE[0]}" exec bash "$(dirname "${BASH_SOURCE[0]}")/$recipe.sh" "$@"
